"""CUDA graphs: capture what a function queues on a stream, replay it with one call."""

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

from streamer.errors import DeviceError


class GraphDevice(Protocol):
    """What capturing needs of the CUDA device."""

    driver: Any

    def activate(self) -> None: ...


class Graph:
    """An executable graph. Replays in stream order; close it when no replay is in flight."""

    def __init__(self, device: GraphDevice, stream: Any, queue: Callable[[], object]) -> None:
        """`queue` launches on `stream` (the driver's handle) only; nothing runs now."""
        device.activate()
        self._driver, api = device.driver, device.driver.api
        # a library's first use of a kernel may load its code meanwhile: relaxed lets this thread do so
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._driver.call("cuStreamBeginCapture", stream, mode)
        try:
            queue()
        except BaseException:
            api.cuStreamEndCapture(stream)  # leave the stream usable; its own error would hide the cause
            raise
        graph = self._driver.call("cuStreamEndCapture", stream)
        try:
            self._nodes = int(self._driver.call("cuGraphGetNodes", graph, 0)[1])
            self._executable = self._driver.call("cuGraphInstantiate", graph, 0)
        finally:
            self._driver.call("cuGraphDestroy", graph)
        self._launch = ctypes.CDLL("libcuda.so.1").cuGraphLaunch
        self._launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._handle = int(self._executable)
        self._is_open = True

    @property
    def n_nodes(self) -> int:
        return self._nodes

    def replay(self, *, stream: int) -> None:
        code = self._launch(self._handle, stream)
        if code != 0:
            error: DeviceError = self._driver.error("cuGraphLaunch", self._driver.api.CUresult(code))
            raise error

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._driver.call("cuGraphExecDestroy", self._executable)

    def __repr__(self) -> str:
        return f"<Graph {self._nodes} nodes>"
