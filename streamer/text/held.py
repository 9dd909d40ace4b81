"""What must be held back of a text that is still arriving. Pure."""


def partial_suffix(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    longest = min(len(text), len(marker) - 1)
    at = text.find(marker[0], len(text) - longest) if longest > 0 else -1
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


class JsonScanner:
    """Finds where a JSON value that begins with a bracket ends, over any cutting of the text into pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Index in `text` just after the value's last bracket; None while it goes on."""
        for at, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "[{":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None
