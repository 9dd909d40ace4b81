"""Who may ask: keys for TCP, compared in constant time and never kept in the clear.

Host names answered on TCP.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from streamer.config import is_loopback, split_host_port
from streamer.errors import ClientError, ConfigError

MIN_KEY_LENGTH = 16


class KeyRing:
    """Digests of the accepted keys.

    Empty: no key is asked for (loopback and --no-auth, checked by config.py).
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __repr__(self) -> str:
        return f"KeyRing({len(self._digests)} keys)"

    def accepts(self, key: str) -> bool:
        """Every key is compared, whichever fits: the time tells nothing."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def read_keys(path: str) -> KeyRing:
    """One key a line; blank lines and lines that begin with # are skipped.

    ConfigError names the file, never a key.
    """
    if not path:
        return KeyRing()
    try:
        lines = [x.strip() for x in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: cannot read {path}: {error}") from None
    keys = [x for x in lines if x and not x.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file: {path} holds no key")
    if any(len(key) < MIN_KEY_LENGTH for key in keys):
        raise ConfigError(f"api_key_file: a key in {path} has fewer than {MIN_KEY_LENGTH} characters")
    return KeyRing(keys)


def offered_key(headers: Mapping[str, str]) -> str:
    """From `Authorization: Bearer KEY`, or the X-Api-Key header that Anthropic's clients send."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")


def check_key(headers: Mapping[str, str], keys: KeyRing) -> None:
    if keys and not keys.accepts(offered_key(headers)):
        raise ClientError(
            401, "a valid API key is needed", type="authentication_error", code="invalid_api_key"
        )


def allowed_hosts(listen: str, further: Iterable[str]) -> frozenset[str]:
    """Host names answered on TCP: against pages that rebind their own name to 127.0.0.1."""
    if not listen:
        return frozenset()
    host, _ = split_host_port(listen)
    names = {host.lower(), *(x.lower() for x in further)}
    if is_loopback(host) or host in ("0.0.0.0", "::"):
        names |= {"localhost", "127.0.0.1", "::1"}
    return frozenset(names)


def check_host(host_header: str | None, hosts: frozenset[str]) -> None:
    """A name with or without port; on a wildcard address other names must be listed with --allow-host."""
    name = (host_header or "").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name not in hosts:
        raise ClientError(403, "this Host is not served here", type="permission_error")
