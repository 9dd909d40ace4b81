"""Arrays on the device and raw launches, for tests of single kernels."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamer.config import cache_directory
from streamer.device.base import CopyKind
from streamer.device.cuda import CudaDevice
from streamer.kernels.compile import architecture, compile_source

C_TYPES = {int: ctypes.c_int, float: ctypes.c_float}


class Bench:
    """Arrays on the device and raw launches: only what these tests need."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.stream = device.create_stream("test")
        self.modules: dict[tuple[str, str], Any] = {}

    def put(self, array: np.ndarray) -> Any:
        array = np.ascontiguousarray(array)
        buffer = self.device.allocate(max(16, array.nbytes))
        self.device.upload(
            buffer, 0, array.ctypes.data, array.nbytes, stream=self.stream, kind=CopyKind.ACTIVATIONS
        )
        self.stream.sync()
        return buffer

    def poisoned(self, shape: tuple[int, ...], dtype: type = np.float32) -> Any:
        return self.put(np.full(shape, 0x7FC0DEAD, np.uint32).view(dtype).reshape(shape))

    def get(self, buffer: Any, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        out = np.empty(shape, dtype)
        self.device.download(buffer, 0, out.ctypes.data, out.nbytes, stream=self.stream)
        self.stream.sync()
        return out

    def launch(
        self, source: str, name: str, grid: tuple[int, ...], block: int, *arguments: Any, shared: int = 0
    ) -> None:
        key = (source, name)
        if key not in self.modules:
            module = compile_source(
                source,
                arch=architecture(self.device.capabilities.compute_capability),
                name_expressions=(name,),
                cache_directory=cache_directory() / "kernels",
            )
            self.modules[key] = self.device.function(
                self.device.load_module(module.cubin), module.symbol(name)
            )
        function = self.modules[key]
        api = self.device.driver.api
        if shared > 48 * 1024:
            attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.device.driver.call("cuFuncSetAttribute", function, attribute, shared)
        values = tuple(a.handle if hasattr(a, "handle") else 0 if a is None else a for a in arguments)
        types = tuple(
            ctypes.c_void_p if a is None or hasattr(a, "handle") else C_TYPES[type(a)] for a in arguments
        )
        x, y, z = (*grid, 1, 1)[:3]
        self.device.driver.call(
            "cuLaunchKernel", function, x, y, z, block, 1, 1, shared, self.stream.handle, (values, types), 0
        )
        self.stream.sync()

    @staticmethod
    def nmse(got: np.ndarray, want: np.ndarray) -> float:
        assert np.isfinite(got).all()
        return float(((got - want) ** 2).sum() / (want.astype(np.float64) ** 2).sum())

    @staticmethod
    def to_bf16(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    @staticmethod
    def from_bf16(x: np.ndarray) -> np.ndarray:
        return (x.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture
def bench(device: CudaDevice) -> Iterator[Bench]:
    return Bench(device)
