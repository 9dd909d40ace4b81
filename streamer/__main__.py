"""`ggufd` and `python -m streamer`. The service is imported only by the command that runs it."""

import os
import sys
import threading

from streamer.config import Config
from streamer.errors import GgufdError


def _serve(config: Config) -> int:
    from streamer.device.ahead import wake_driver
    from streamer.process import hold_signals

    early = hold_signals()  # a stop during the imports below is a clean one, too
    wake_driver(config.device)  # while they take their time
    from streamer.service import serve

    return serve(config, early)


def main() -> None:
    from streamer.cli import run
    from streamer.cli.stdio import open_streams

    open_streams()
    _leave(run(_serve))


def _leave(code: int) -> None:
    """Exit without waiting for threads that still build what nobody wants any more (a tokenizer, after a
    refusal); with this code also where the last words cannot be written.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (GgufdError, OSError, ValueError):
        os._exit(code)
    if any(t is not threading.main_thread() and not t.daemon for t in threading.enumerate()):
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
