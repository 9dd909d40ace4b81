"""Errors of a load name the weight they happened to. Pure."""

from streamer.errors import DeviceError, DeviceMemoryError, FileChangedError
from streamer.plan.plan import PlannedWeight


def name_weight(error: Exception, weight: PlannedWeight, path: str, where: str = "") -> Exception:
    """The same error, naming the weight it happened to (and the file, where the file is at fault)."""
    if weight.name in str(error):
        return error
    if isinstance(error, FileChangedError):
        return FileChangedError(path, weight.name, error.reason)
    if isinstance(error, DeviceMemoryError):
        what = f"{weight.name}{where}{': ' + error.what if error.what else ''}"
        return DeviceMemoryError(error.call, error.code, error.asked, error.free, what)
    if isinstance(error, DeviceError):
        return DeviceError(error.call, error.code, f"{weight.name}{where}: {error.explanation}")
    return error
