"""Readers that do not keep up: paused, then dropped, never in others' way."""

import pytest

from streamer.engine.request import FinishReason

both = pytest.mark.parametrize("overlap", [False, True])


@both
def test_a_slow_reader_is_paused_and_slows_nobody(harness, request_of, alone, overlap):
    h = harness(overlap=overlap, backlog_limit=8)
    slow_request, fast_request = request_of("slow", 4, 40), request_of("fast", 4, 40)
    slow, fast = h.submit(slow_request), h.submit(fast_request)
    slow.reads = False
    h.turn_until(lambda: fast.finish is not None)
    assert len(fast.ids) == 40
    assert 7 <= len(slow.ids) <= 9  # what was in flight when the queue was full still comes
    h.run()
    assert slow.finish is None
    slow.reads = True
    slow.read_all()
    h.run()
    assert slow.ids == alone(slow_request, 40)
    h.loop.check_integrity()


def test_a_reader_that_stays_slow_is_dropped(harness, request_of):
    h = harness(backlog_limit=8, slow_reader_s=5.0)
    slow = h.submit(request_of("slow", 4, 40))
    slow.reads = False
    h.run()
    assert h.loop.next_due_s() == pytest.approx(h.clock.now + 5.0, abs=0.1)
    h.clock.now += 5.1
    h.run()
    assert slow.finish.reason is FinishReason.CANCELLED
    assert "slow" in slow.finish.error
    h.loop.check_integrity()


def test_a_paused_stream_gives_way_when_others_need_its_slot_or_pages(harness, request_of, alone):
    h = harness(max_sequences=1, backlog_limit=8)
    slow_request, fast_request = request_of("slow", 4, 40), request_of("fast", 4, 40)
    slow = h.submit(slow_request)
    slow.reads = False
    h.run()
    fast = h.submit(fast_request)
    h.run()
    assert fast.ids == alone(fast_request, 40)
    slow.reads = True
    slow.read_all()
    h.run()
    assert slow.ids == alone(slow_request, 40)
    h.loop.check_integrity()
