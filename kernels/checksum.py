"""Machine code of the residency checksum. Reference: `streamer.device.checksum.checksum_reference`."""

from collections.abc import Callable
from pathlib import Path

from streamer.kernels.compile import architecture, compile_source


def checksum_code(cache_directory: Path | None) -> Callable[[tuple[int, int]], bytes]:
    """What `CudaDevice` wants for its checksums: compute capability -> cubin with the kernel `checksum`."""

    def compile_for(capability: tuple[int, int]) -> bytes:
        return compile_source(
            "checksum.cu", arch=architecture(capability), cache_directory=cache_directory
        ).cubin

    return compile_for
