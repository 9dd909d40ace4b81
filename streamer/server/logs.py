"""One line an event on stderr.

Key=value or JSON, journald's level prefixes, a request id where there is a request.
"""

import contextvars
import json
import logging
import sys
import time
from typing import Any

PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def log_event(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log `event` (a short constant) with fields. A prompt's text only where `log_prompts` asks for it."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": fields})


class EventFormatter(logging.Formatter):
    """`style` kv or json; `journal` puts <N> before the line and leaves the time to the journal."""

    def __init__(self, style: str, *, journal: bool, debug: bool) -> None:
        super().__init__()
        self._as_json, self._journal, self._debug = style == "json", journal, debug

    def format(self, record: logging.LogRecord) -> str:
        fields = self._fields(record)
        line = json.dumps(fields, default=str) if self._as_json else _key_values(fields)
        prefix = f"<{PRIORITIES.get(record.levelno, 6)}>" if self._journal else ""
        return prefix + line

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if not self._journal:
            moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            fields["time"] = f"{moment}.{int(record.msecs):03d}Z"
        fields |= {"level": record.levelname.lower(), "event": record.getMessage()}
        request_id = REQUEST_ID.get()
        if request_id:
            fields["request"] = request_id
        if record.name not in ("ggufd", "root"):
            fields["room"] = record.name.removeprefix("streamer.")
        fields |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            fields["error"] = f"{type(error).__name__}: {error}"
            if self._debug:
                fields["traceback"] = self.formatException(record.exc_info)
        return fields


def _key_values(fields: dict[str, Any]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items())


def _value(value: Any) -> str:
    """Plain where it is plain.

    Quoted with escapes otherwise, so that a value can never look like a field or a line.
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text != "" and text.isascii() and text.isprintable() and not any(c in text for c in ' "=\\')
    return text if plain else json.dumps(text)


def configure_logging(*, style: str, level: str, journal: bool, debug: bool) -> None:
    """Replace the root logger's handlers by one on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter(style, journal=journal, debug=debug))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("aiohttp").setLevel("ERROR")
