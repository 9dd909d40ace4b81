"""`ggufd` and `python -m streamer`. The service is imported only by the command that runs it."""

import contextlib
import os
import sys
import threading

from streamer.config import Config


def _serve(config: Config) -> int:
    from streamer.device.ahead import wake_driver

    wake_driver(config.device)  # while the imports below take their time
    from streamer.service import serve

    return serve(config)


def main() -> None:
    from streamer.cli import run

    _leave(run(_serve))


def _leave(code: int) -> None:
    """Exit without waiting for threads that still build what nobody wants any more (a tokenizer, after a
    refusal).
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if any(t is not threading.main_thread() and not t.daemon for t in threading.enumerate()):
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
