"""Standard input and output as commands use them: whatever the caller closed, filled or encoded otherwise."""

import io
import os
import sys
from typing import Any

from streamer.errors import GgufdError


class BadInputError(GgufdError):
    """Standard input, or text of the command line, is not what the command reads."""

    exit_code = 2


class OutputError(GgufdError):
    """Standard output cannot be written: EX_IOERR."""

    exit_code = 74


class _Output(io.FileIO):
    """Descriptor 1, whose errors say whose they are. A reader that is gone stays a BrokenPipeError."""

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror}") from None


def open_streams() -> None:
    """Make descriptors 0 to 2 and sys.std* what the commands count on. Once, first thing.

    What the caller closed is opened the wrong way round, so that using it still fails: left free, the number
    would go to the next file that is opened, and a print would land in it. Messages without a stderr are
    lost. Characters that the encoding lacks are escaped.
    """
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    if sys.stderr is None:
        sys.stderr = _writer(io.FileIO(2, "w", closefd=False), "utf-8", line_buffering=True)
    out = sys.stdout
    encoding = "utf-8" if out is None else out.encoding
    sys.stdout = _writer(
        _Output(1, "w", closefd=False), encoding, line_buffering=bool(out and out.line_buffering)
    )


def _writer(raw: io.FileIO, encoding: str, *, line_buffering: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=line_buffering
    )


def drop_output() -> None:
    """From now on standard output goes nowhere, with what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def write_utf8(text: str) -> None:
    """For machines: the text itself, whatever a terminal here would show."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())


def read_bytes() -> bytes:
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise BadInputError(f"standard input cannot be read: {error.strerror}") from None


def read_text() -> str:
    try:
        return read_bytes().decode()
    except UnicodeDecodeError as error:
        raise BadInputError(f"standard input is not UTF-8: {error}") from None


def check_text(text: str, what: str) -> str:
    """Text of the command line, which comes with surrogates for bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(f"{what} is not UTF-8: {error}") from None
    return text
