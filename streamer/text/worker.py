"""A process of our own that does what would hold the interpreter lock or cannot be trusted to end.

It gets its data through an inherited descriptor and talks over socket pairs; it ends when those close, so
it never outlives its owner. It sees neither our environment nor our signals.
"""

import contextlib
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import streamer

_PROGRAM = """
from contextlib import suppress
from signal import *
signal(SIGINT, SIG_IGN)
signal(SIGTERM, SIG_IGN)
from {module} import main
with suppress(EOFError, ConnectionError):  # an owner that has left, whatever this was doing for it
    main({arguments})
"""


class Worker:
    """One process running `module.main(payload_fd, fds, *args)` with `n_channels` connections to it.

    Owns the process and this side's connections; both are gone after `close` or when nothing refers to it.
    """

    def __init__(
        self, module: str, *, n_channels: int = 1, payload: int | None = None, args: Sequence[int] = ()
    ) -> None:
        pairs = [Pipe() for _ in range(n_channels)]
        fds = [theirs.fileno() for _, theirs in pairs]
        arguments = ", ".join(map(repr, (payload, fds, *args)))
        code = _PROGRAM.format(module=module, arguments=arguments)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds if payload is None else [*fds, payload],
                env=_environment(),
            )
        except BaseException:
            for pair in pairs:
                for connection in pair:
                    connection.close()
            raise
        for _, theirs in pairs:
            theirs.close()
        self.channels: list[Connection] = [ours for ours, _ in pairs]
        self._end = weakref.finalize(self, _end, self._process, self.channels)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process at once, whatever it is doing."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Asks the process to end and waits for it. Idempotent."""
        self._end()


def _environment() -> dict[str, str]:
    """Nothing of ours but where the modules are: no sockets, no keys."""
    paths = [str(Path(streamer.__file__).parents[1]), *(p for p in sys.path if p)]
    return {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}


def _end(process: "subprocess.Popen[bytes]", channels: list[Connection]) -> None:
    for channel in channels:
        with contextlib.suppress(OSError):
            channel.close()
    try:
        process.wait(timeout=0.2)  # it ends by itself unless it is in the middle of something
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
