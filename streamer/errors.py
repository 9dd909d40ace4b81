"""What can go wrong, sorted by whose fault it is. Imports nothing.

Every error a user can meet derives from `GgufdError` and knows the process's exit code (sysexits.h).
Translate a foreign exception once, at the border where it is met; never swallow one.
"""


def readable(path: str) -> str:
    """A path as others are told it: bytes that are no UTF-8 as `\\xff`; JSON and HTTP carry only text."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def one_line(text: str) -> str:
    """`text` with what a terminal would act on (line ends, escapes) written out, and `readable`."""
    return text if text.isprintable() else "".join(map(_written_out, text))


def _written_out(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a path
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character if character.isprintable() else ascii(character)[1:-1]


class GgufdError(Exception):
    """A fault of ours unless a subclass says otherwise. `exit_code` is what the process ends with."""

    exit_code = 70


class GGUFError(GgufdError):
    """The model file is refused: `FILE: SUBJECT: REASON`, subject a key, a tensor or `header`.

    Its text is one line whatever the path and the file's own words hold; the attributes are as given.
    """

    exit_code = 65

    def __init__(self, path: str, subject: str, reason: str) -> None:
        super().__init__(one_line(f"{path}: {subject}: {reason}"))
        self.path, self.subject, self.reason = path, subject, reason


class FileChangedError(GGUFError):
    """The file was truncated, overwritten or failed to read while it was being loaded."""


class PlanError(GgufdError):
    """The model and the configuration do not go together (does not fit); carries the sum."""

    exit_code = 78


class ConfigError(GgufdError):
    """An option has a value that cannot work; names the option and where it came from."""

    exit_code = 78


class SocketError(GgufdError):
    """The socket cannot be had: live owner, not a socket, no permission."""

    exit_code = 73


class DeviceNotFoundError(GgufdError):
    """The device asked for is not there (no driver, no such ordinal)."""

    exit_code = 69


class DeviceError(GgufdError):
    """A device call failed: the call's name, the code's name and its explanation."""

    exit_code = 71

    def __init__(self, call: str, code: str, explanation: str) -> None:
        super().__init__(f"{call}: {code}: {explanation}")
        self.call, self.code, self.explanation = call, code, explanation


class DeviceMemoryError(DeviceError):
    """An allocation failed: says what was asked and what was free, in bytes."""

    def __init__(self, call: str, code: str, asked: int, free: int, what: str = "") -> None:
        super().__init__(call, code, f"{what + ': ' if what else ''}asked {asked} bytes, {free} bytes free")
        self.asked, self.free, self.what = asked, free, what


class ResidencyError(GgufdError):
    """Device bytes are not the file's bytes, or a planned weight cannot become resident; names the weight."""

    exit_code = 71


class ClientError(GgufdError):
    """The request is at fault (or cannot be served now): becomes OpenAI's error object.

    `status` is the HTTP status, `extra` further members of the error object,
    `retry_after_s` becomes the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        retry_after_s: int | None = None,
        extra: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.retry_after_s, self.extra = retry_after_s, extra or {}
