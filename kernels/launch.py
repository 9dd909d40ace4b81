"""Kernels loaded from compiled modules, and launched at little cost: one driver call over storage made once.

`cuLaunchKernelEx` is called through ctypes: the bindings' own wrapper packs arguments anew at every call
(about 8 us), this costs one to two. A launch may be captured into a graph. Launch from one thread at a time.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from streamer.errors import DeviceError
from streamer.kernels.compile import CompiledModule, compile_source

MAX_STATIC_SHARED = 48 * 1024  # bytes of dynamic shared memory a kernel may have without asking
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_..., cuda.h
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Grid = tuple[int, int, int]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: id, padding, a union of 64 bytes of which the first int is used."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


class ModuleDevice(Protocol):
    """What loading code needs of the CUDA device."""

    driver: Any

    def activate(self) -> None: ...
    def load_module(self, cubin: bytes) -> Any: ...
    def function(self, module: Any, symbol: str) -> Any: ...


@lru_cache(maxsize=1)
def _launch_function() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    function = library.cuLaunchKernelEx
    function.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function


class Kernel:
    """A function on the device with its argument types (ctypes; a Structure is passed by value).

    `dependent` launches carry programmatic stream serialization: the kernel may start before its predecessor
    on the stream has ended and waits for it itself (griddepcontrol.wait). Give it only to kernels that do.
    """

    def __init__(
        self, device: ModuleDevice, function: Any, types: Sequence[type], *, name: str, shared: int = 0
    ) -> None:
        self.name, self._driver = name, device.driver
        self._function = ctypes.c_void_p(int(function))
        self._cells = [t() for t in types]
        self._arguments = (ctypes.c_void_p * len(types))(*(ctypes.addressof(cell) for cell in self._cells))
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self._config = _Config(attributes=ctypes.pointer(self._attribute), shared=shared)
        self._launch = _launch_function()
        if shared > MAX_STATIC_SHARED:
            device.activate()
            attribute = device.driver.api.CUfunction_attribute(_MAX_DYNAMIC_SHARED)
            device.driver.call("cuFuncSetAttribute", function, attribute, shared)

    def __call__(self, grid: Grid, block: int, *values: Any, stream: int, dependent: bool = True) -> None:
        """Launch on `stream` (a handle). Values in the order of the types, copied during the call."""
        for i, (cell, value) in enumerate(zip(self._cells, values, strict=True)):
            if isinstance(cell, ctypes.Structure):
                self._arguments[i] = ctypes.addressof(value)
            else:
                cell.value = value
        config = self._config
        config.grid[:] = grid
        config.block[:] = (block, 1, 1)
        config.stream, config.n_attributes = stream, int(dependent)
        code = self._launch(config, self._function, self._arguments, None)
        if code != 0:
            raise self._error(code)

    def _error(self, code: int) -> DeviceError:
        error: DeviceError = self._driver.error("cuLaunchKernelEx", self._driver.api.CUresult(code))
        return DeviceError(f"cuLaunchKernelEx({self.name})", error.code, error.explanation)

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"


class KernelSource(Protocol):
    """Where launchers get kernels: a `KernelStore`, or one that only remembers what was asked for."""

    def kernel(self, source: str, name: str, types: Sequence[type], *, shared: int = 0) -> Any: ...


@dataclass(frozen=True)
class ModuleSpec:
    """A source and the template instances wanted of it: one compilation."""

    source: str
    instances: tuple[str, ...] = ()


class KernelStore:
    """Compiled, loaded modules of one device. `compile` from any thread; `kernel` from the launching one."""

    def __init__(self, device: ModuleDevice, arch: str, *, cache_directory: Path | None = None) -> None:
        self._device, self.arch, self._cache_directory = device, arch, cache_directory
        self._modules: dict[
            tuple[str, str], tuple[CompiledModule, Any]
        ] = {}  # (source, instance) -> code, CUmodule

    def compile(self, specs: Sequence[ModuleSpec], threads: Executor | None = None) -> None:
        """Compile and load modules, in `threads` where given; what is there already costs nothing."""
        missing = [s for s in specs if any((s.source, i) not in self._modules for i in s.instances or ("",))]
        compiled = threads.map(self._compiled, missing) if threads else map(self._compiled, missing)
        for spec, code in zip(missing, compiled, strict=True):
            module = self._device.load_module(code.cubin)
            for instance in spec.instances or ("",):
                self._modules[spec.source, instance] = code, module

    def kernel(self, source: str, name: str, types: Sequence[type], *, shared: int = 0) -> Kernel:
        """A kernel by instance or extern "C" name; compiles its module now if nobody asked for it before."""
        instance = name if "<" in name else ""
        if (source, instance) not in self._modules:
            self.compile([ModuleSpec(source, (name,) if instance else ())])
        code, module = self._modules[source, instance]
        function = self._device.function(module, code.symbol(name))
        return Kernel(self._device, function, types, name=name, shared=shared)

    def _compiled(self, spec: ModuleSpec) -> CompiledModule:
        return compile_source(
            spec.source,
            arch=self.arch,
            name_expressions=spec.instances,
            cache_directory=self._cache_directory,
        )
