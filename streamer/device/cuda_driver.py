"""The NVIDIA driver as this house uses it: loaded on demand, every return code checked and explained.

The bindings return tuples `(code, *values)`; `Driver.call` turns them into values or errors. They release the
interpreter lock in every call. A call that never waits is cheaper with the lock held, where many threads want
it back: `Driver.quick` has these. Importing this file loads nothing.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from streamer.device.base import Capabilities
from streamer.errors import DeviceError, DeviceNotFoundError

OUT_OF_MEMORY = 2
NOT_READY = 600
# Codes after which the context is lost: every later call fails until the process lets the context go.
LOST_CONTEXT = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})

# Capabilities field -> CUdevice_attribute
_ATTRIBUTES = {
    "multiprocessors": "MULTIPROCESSOR_COUNT",
    "integrated": "INTEGRATED",
    "pageable_memory_access": "PAGEABLE_MEMORY_ACCESS",
    "pageable_uses_host_page_tables": "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    "host_register": "HOST_REGISTER_SUPPORTED",
    "read_only_host_register": "READ_ONLY_HOST_REGISTER_SUPPORTED",
    "memory_pools": "MEMORY_POOLS_SUPPORTED",
    "copy_engines": "ASYNC_ENGINE_COUNT",
    "unified_addressing": "UNIFIED_ADDRESSING",
}
_COUNTS = frozenset({"multiprocessors", "copy_engines"})

# The driver keeps one current context a thread; this remembers which of ours it is, to save the call.
_current = threading.local()


class QuickCalls:
    """Calls of libcuda that never wait, with the interpreter lock held: integers in, the code out.

    A copy may only be given memory that is pinned or registered: from other memory the driver waits for it.
    """

    def __init__(self, library: Any) -> None:
        def function(symbol: str, *types: Any) -> Callable[..., int]:
            found: Any = getattr(library, symbol)
            found.argtypes, found.restype = types, ctypes.c_int
            return found  # type: ignore[no-any-return]

        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.cuMemcpyHtoDAsync = function("cuMemcpyHtoDAsync_v2", ctypes.c_uint64, pointer, size, pointer)
        self.cuEventRecord = function("cuEventRecord", pointer, pointer)  # (event, stream)
        self.cuEventQuery = function("cuEventQuery", pointer)


class Driver:
    """Checked calls of `cuda.bindings.driver`. `api` is that module; its functions may be called directly."""

    def __init__(self, api: Any, quick: Any) -> None:
        self.api, self.quick = api, quick
        self.lost = False  # a call answered with a code of LOST_CONTEXT

    def call(self, name: str, *arguments: Any) -> Any:
        """Call `name`: its value (a tuple of several, None of none), or DeviceError with the explanation."""
        code, *values = getattr(self.api, name)(*arguments)
        if code != 0:
            raise self.error(name, code)
        return values[0] if len(values) == 1 else tuple(values) or None

    def error(self, name: str, code: Any) -> DeviceError:
        """The error of a call that answered `code`."""
        if int(code) in LOST_CONTEXT:
            self.lost = True
        return DeviceError(name, self._text("cuGetErrorName", code), self._text("cuGetErrorString", code))

    def _text(self, function: str, code: Any) -> str:
        try:
            answer, text = getattr(self.api, function)(self.api.CUresult(int(code)))
        except ValueError:  # newer than the bindings
            return f"code {int(code)}"
        return text.decode(errors="replace") if answer == 0 and text else f"code {int(code)}"

    def make_current(self, context: Any, token: object) -> None:
        """Make `context` the calling thread's; `token` tells one opening of a context from the next."""
        if getattr(_current, "token", None) is not token:
            self.call("cuCtxSetCurrent", context)
            _current.token = token


def load_driver() -> Driver:
    """The initialised driver (about 0.2 s the first time). DeviceNotFoundError says what is missing."""
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise DeviceNotFoundError(
            f"CUDA bindings are not installed (pip install 'ggufd[cuda]'): {error}"
        ) from error
    try:
        (code,) = api.cuInit(0)
    except RuntimeError as error:  # the bindings found no libcuda
        raise DeviceNotFoundError("no NVIDIA driver: libcuda.so.1 is not there") from error
    driver = Driver(api, QuickCalls(ctypes.PyDLL("libcuda.so.1")))
    if code != 0:
        raise DeviceNotFoundError(f"the NVIDIA driver does not answer: {driver.error('cuInit', code)}")
    return driver


def find_device(driver: Driver, ordinal: int) -> Any:
    """Handle of device `ordinal`; DeviceNotFoundError tells how many there are."""
    count = int(driver.call("cuDeviceGetCount"))
    if not 0 <= ordinal < count:
        raise DeviceNotFoundError(f"cuda:{ordinal}: no such device, the driver has {count}")
    return driver.call("cuDeviceGet", ordinal)


def read_capabilities(driver: Driver, device: Any, ordinal: int) -> Capabilities:
    """What the driver says of a device; needs no context."""
    attribute = driver.api.CUdevice_attribute

    def read(name: str) -> int:
        return int(
            driver.call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
        )

    values = {field: read(name) for field, name in _ATTRIBUTES.items()}
    return Capabilities(
        kind="cuda",
        name=driver.call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace"),
        ordinal=ordinal,
        compute_capability=(read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        **{field: value if field in _COUNTS else bool(value) for field, value in values.items()},  # type: ignore[arg-type]
    )
