"""From a device's name to the device. What a backend needs is imported only when it is asked for."""

from streamer.device.base import Device
from streamer.device.cuda_checksum import ChecksumCode
from streamer.errors import DeviceNotFoundError


def open_device(
    asked: str, *, checksum_code: ChecksumCode, host_link_bytes_per_s: float = 0.0
) -> tuple[Device, str | None]:
    """Open "host", "cuda", "cuda:N" or "auto" (up to 0.4 s with CUDA: call it in a thread).

    Returns the device and, where "auto" fell back to the host, a line that says why. DeviceNotFoundError when
    a device asked for by name is not there. `checksum_code` gives CUDA its checksum kernel
    (`kernels.checksum.checksum_code`); `host_link_bytes_per_s` simulates a link on the host (0: none).
    """
    kind, _, ordinal = asked.partition(":")
    if kind in ("cuda", "auto"):
        from streamer.device.cuda import open_cuda

        try:
            return open_cuda(int(ordinal or 0), checksum_code=checksum_code), None
        except DeviceNotFoundError as error:
            if kind == "cuda":
                raise
            reason = f"no CUDA device ({error}): using the host device"
    elif kind == "host":
        reason = None
    else:
        raise DeviceNotFoundError(f"{asked!r} names no device: auto, host, cuda or cuda:N")
    from streamer.device.host import HostDevice

    return HostDevice(link_bytes_per_s=host_link_bytes_per_s or None), reason
