"""A loop that lags behind the engine: what has come meanwhile goes out together, and means the same."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from streamer.engine.handle import Handle
from streamer.engine.request import (
    FinishEvent,
    FinishReason,
    PrefillEvent,
    PromptEvent,
    Request,
    SamplingParameters,
    TokenEvent,
)
from streamer.server.sequences import End, Prepared, Progress, Text, run_sequences


class EagerEngine:
    """Delivers all events of a request while it is being submitted."""

    def __init__(self, events):
        self.events, self.asked = events, []

    def submit_nowait(self, request):
        handle = Handle(request, asyncio.get_running_loop(), self._ask, lambda: None, 64)
        for event in self.events:
            handle.deliver(event)
        return handle

    def _ask(self, handle, reason):
        self.asked.append(reason)
        handle.deliver(finish(reason))


def finish(reason):
    return FinishEvent(reason, 1.0, 2.0, 3.0, 4.0, 2, 3, 0, 0)


def tokens(word):
    return [TokenEvent(i) for i in word.encode()]


def play(text, events, *, stops=(), n=1):
    engine = EagerEngine(events)
    request = Request("r", (1, 2), SamplingParameters(), 16)

    async def main():
        prepared = [Prepared(request, text.token_text(stops, with_logprobs=False)) for _ in range(n)]
        async with aclosing(run_sequences(engine, prepared)) as items:
            return [item async for item in items]

    return asyncio.run(main()), engine


@pytest.mark.parametrize("n", [1, 2])
def test_tokens_that_have_come_go_out_in_one_piece(text, n):
    events = [PrefillEvent(1, 2), PromptEvent(0), *tokens("hello"), finish(FinishReason.LENGTH)]
    items, _ = play(text, events, n=n)
    for index in range(n):
        own = [item for item in items if item.index == index]
        assert [type(item) for item in own] == [Progress, Text, End]
        assert own[1].piece.text == "hello"
        assert own[2].finish == "length"


def test_a_stop_string_within_a_batch_cuts_it(text):
    items, engine = play(text, [PromptEvent(0), *tokens("one. two")], stops=(".",))
    assert [type(item) for item in items] == [Text, End]
    assert items[0].piece.text == "one"
    assert items[1].finish == "stop"
    assert items[1].stop == "."
    assert engine.asked == [FinishReason.STOP]


def test_a_stop_string_in_the_last_batch_is_the_reason_of_the_end(text):
    events = [PromptEvent(0), *tokens("one. two"), finish(FinishReason.LENGTH)]
    items, _ = play(text, events, stops=(".",))
    assert items[0].piece.text == "one"
    assert items[-1].finish == "stop"


def test_what_was_sampled_after_a_stop_string_is_not_counted(text):
    events = [PromptEvent(0), *tokens("one. two"), replace(finish(FinishReason.LENGTH), n_generated=8)]
    items, _ = play(text, events, stops=(".",))
    assert items[-1].event.n_generated == len("one.")
    unstopped, _ = play(text, events)
    assert unstopped[-1].event.n_generated == 8
