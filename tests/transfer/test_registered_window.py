"""Registered windows: aligned, never overlapping, given back after their copies, bounded."""

import numpy as np
from pipeline_support import CHUNK, Piece, assert_exact, assert_nothing_held, build, make_transfer, run_load

from streamer.device.host import HostDevice

PAGE = 4096


class Watching(HostDevice):
    """Keeps the live registrations and checks each upload's source lies in one of them."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.live: dict[int, int] = {}
        self.most = 0

    def register(self, address, nbytes):
        assert address % PAGE == 0
        assert nbytes % PAGE == 0
        for other, size in self.live.items():
            assert address + nbytes <= other or other + size <= address, "windows overlap"
        registration = super().register(address, nbytes)
        self.live[address] = nbytes
        self.most = max(self.most, len(self.live))
        close = registration.close

        def closing() -> None:
            self.live.pop(address, None)
            close()

        registration.close = closing
        return registration

    def upload(self, buffer, offset, source, nbytes, *, stream, kind) -> None:
        inside = [a for a, size in self.live.items() if a <= source and source + nbytes <= a + size]
        assert inside, "a copy outside any one window"

        def copied() -> None:
            assert inside[0] in self.live, "unregistered before its copy"

        super().upload(buffer, offset, source, nbytes, stream=stream, kind=kind)
        stream.submit(copied)


def noise(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def test_windows_cover_copies_and_are_bounded(tmp_path) -> None:
    sizes = [3 * CHUNK + 77 * i for i in range(10)]
    model = build(tmp_path, [Piece(n, layer=i, data=noise(n, i)) for i, n in enumerate(sizes)])
    device = Watching(link_bytes_per_s=50e6)
    transfer = make_transfer("window", device, window_nbytes=3 * PAGE, max_windows=2)
    weights, _ = run_load(model, device, transfer, verify=True)
    assert_exact(model, device, weights)
    assert device.most == 2
    assert device.statistics().peak_pinned_bytes <= 2 * 3 * PAGE
    weights.close()
    transfer.close()
    assert_nothing_held(device)


def test_an_order_far_from_the_files_registers_windows_again(tmp_path) -> None:
    """Execution order jumps between two ends of the file."""
    pieces = [Piece(CHUNK // 2, layer=i, data=noise(CHUNK // 2, i)) for i in range(12)]
    model = build(tmp_path, pieces)
    shuffled = [model.plan.weights[i] for i in (0, 11, 1, 10, 2, 9, 3, 8, 4, 7, 5, 6)]
    from dataclasses import replace

    weights = tuple(replace(w, index=i, segment=i) for i, w in enumerate(shuffled))
    segments = tuple(
        replace(
            model.plan.segments[0], index=i, name=f"layer {i}", layer=i, nbytes=w.tensor.nbytes, weights=(i,)
        )
        for i, w in enumerate(weights)
    )
    model.plan = replace(model.plan, weights=weights, segments=segments)
    device = Watching()
    resident, _ = run_load(model, device, make_transfer("window", device, window_nbytes=PAGE), verify=True)
    assert_exact(model, device, resident)
    device.close()


def test_the_tail_of_the_file_is_registered_in_whole_pages(tmp_path) -> None:
    model = build(tmp_path, [Piece(PAGE + 1, layer=0)], header=0)
    device = Watching()
    weights, _ = run_load(model, device, make_transfer("window", device))
    assert_exact(model, device, weights)
    device.close()
