"""What a start may be told, and how the configuration says it."""

from dataclasses import dataclass, field
from pathlib import Path

from streamer.config import Config, cache_directory
from streamer.runtime.planning import RuntimeOptions


@dataclass(frozen=True)
class StartOptions:
    """Everything `start_runtime` may be told."""

    path: str
    device: str = "auto"
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    transfer: str = "auto"
    ring_mib: int = 0  # 0: by machine
    touch_threads: int = 0
    keep_registered: bool = False
    verify: bool = False
    trace: str = ""
    blas_threads: int = 0
    host_link_bytes_per_s: float = 0.0
    cache_directory: Path | None = None
    queue_limit: int = 256
    queue_timeout_s: float | None = None
    slow_reader_s: float = 30.0

    @classmethod
    def of(cls, config: Config, path: str) -> "StartOptions":
        return cls(
            path=path,
            device=config.device,
            runtime=RuntimeOptions(
                n_ctx=config.ctx,
                max_sequences=config.max_sequences,
                batch_tokens=config.batch_tokens,
                kv_type=config.kv_type,
                prefix_cache=config.prefix_cache,
            ),
            transfer=config.transfer,
            ring_mib=config.ring_mib,
            touch_threads=config.touch_threads,
            keep_registered=config.keep_registered,
            verify=config.verify,
            trace=config.trace,
            blas_threads=config.blas_threads,
            host_link_bytes_per_s=config.host_link_bytes_per_s,
            cache_directory=cache_directory() / "kernels",
            queue_limit=config.max_queue,
            queue_timeout_s=config.queue_timeout,
            slow_reader_s=config.write_timeout,
        )
