"""What a daemon's process sees to before its loop runs: signals, descriptors, a place for the trace."""

import contextlib
import resource
import signal

from streamer.errors import ConfigError
from streamer.trace import check_writable

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def hold_signals() -> list[int]:
    """Signals until the loop handles them: from here on there is something to clean up."""
    early: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda n, _: early.append(n))
    return early


def raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def check_trace(path: str) -> None:
    if path:
        try:
            check_writable(path)
        except OSError as error:
            raise ConfigError(f"trace: cannot write {path}: {error.strerror}") from None
