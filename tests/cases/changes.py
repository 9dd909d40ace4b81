"""What a test changes in a daemon before it runs, by name. Each runs in the forked process only."""

import os
from typing import Any

from streamer.errors import DeviceError


def count_allocations() -> None:
    """Every allocation of device memory becomes a line of the log: a refusal must come before the first.

    Pinned memory is the host's; it may come up beside the reading of the header.
    """
    from streamer.device.host import HostDevice

    allocate = HostDevice.allocate

    def told(self: HostDevice, nbytes: int, *, what: str = "") -> Any:
        os.write(2, f"ALLOCATED {nbytes}\n".encode())
        return allocate(self, nbytes, what=what)

    HostDevice.allocate = told  # type: ignore[method-assign]


def fail_in_decode() -> None:
    """The 12th step after FAIL_WHEN is there fails as an illegal access does: this one and all that follow.

    FAIL_AT gives another number.
    """
    from streamer.kernels.host_executor import HostExecutor

    step = HostExecutor.step
    counted = {"steps": 0}

    def failing(self: HostExecutor, batch: Any, sampling: Any) -> Any:
        counted["steps"] += len(batch.spans) > 0 and os.path.exists(os.environ["FAIL_WHEN"])
        if counted["steps"] >= int(os.environ.get("FAIL_AT", "12")):
            raise DeviceError("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal access")
        return step(self, batch, sampling)

    HostExecutor.step = failing  # type: ignore[method-assign]


def jump_clocks() -> None:
    """The wall clock goes back and forth by a day at every look."""
    import time

    real, looks = time.time, iter(range(1 << 62))
    time.time = lambda: real() + (86400.0 if next(looks) % 2 else -86400.0)


def fail_reading() -> None:
    """The third touch of the file's pages meets a disk error."""
    import errno

    from streamer.gguf.mapping import Mapping

    touch, touches = Mapping.touch, iter(range(1 << 62))

    def failing(self: Mapping, offset: int, nbytes: int) -> None:
        if next(touches) == 2:
            self._raise_touch_failed(errno.EIO, offset, nbytes)
        touch(self, offset, nbytes)

    Mapping.touch = failing  # type: ignore[method-assign]
