"""Inputs to begin with, by target: made here, so that they follow the code; found/TARGET/ keeps the finds."""

import json
import struct
from pathlib import Path

FOUND = Path(__file__).with_name("found")
DATA = Path(__file__).parents[1] / "data"


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _headers() -> list[bytes]:
    """The real headers of the tiny models (without their weights), and a few packed by hand."""
    found = [path.read_bytes()[:6000] for path in sorted(DATA.glob("tiny-*.gguf"))]
    key = _text("general.architecture") + struct.pack("<I", 8) + _text("llama")
    nested = _text("x") + struct.pack("<IIQIQB", 9, 9, 1, 0, 1, 7)
    floats = _text("y") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0)
    strings = _text("z") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("é")
    tensor = _text("token_embd.weight") + struct.pack("<I2QIQ", 2, 4, 4, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 4) + key + nested + floats + strings + tensor
    found.append(head + bytes(-len(head) % 32) + bytes(64))
    alignment = _text("general.alignment") + struct.pack("<II", 4, 64)
    found.append(b"GGUF" + struct.pack("<IQQ", 2, 0, 2) + key + alignment)
    found.append(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text("x") + struct.pack("<IIQ", 9, 0, 1 << 63))
    return found


def _vocabularies() -> list[bytes]:
    bpe = bytes([5, 0, 2, 0, 0, 1, 2, 0, 3, 2, 3, 8]) + b"abcdefgh" + bytes([3, 5, 8]) + bytes(8)
    spm = bytes([4, 0, 2, 0, 1, 2, 3, 12]) + bytes([6, 7, 8, 9, 10, 200, 201, 202, 203, 204, 205, 206])
    return [bpe + b"hello", spm + bytes([4, 6, 12]) + bytes(48) + b"abc", b""]


TEMPLATES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro f(x) %}{{ x|tojson(indent=2) }}{% endmacro %}{{ f(messages) }}{{ strftime_now('%Y') }}",
    "{{ raise_exception('no') }}{% generation %}x{% endgeneration %}",
    "{%- if tools is defined and tools -%}{{ tools | length }}{%- elif messages[0] %}s{% endif %}",
    "{{ ''.__class__.__mro__ }}{{ '%s' | format(messages) }}{{ messages | map(attribute='role') | join }}",
)

REQUESTS = tuple(json.loads(Path(__file__).with_name("requests.json").read_text()))


def _streams() -> list[bytes]:
    plain = bytes([0, 1]) + bytes(range(132, 170))
    stopped = bytes([2, 2]) + b"ab" + bytes([1]) + b"c" + bytes([0]) + bytes(range(132, 150))
    return [plain, stopped, bytes([0, 2]) + bytes([36 + 4, 27 + 4, 20, 4, 5, 132, 133])]


def seeds(target: str) -> list[bytes]:
    """The made ones, then the finds of earlier runs."""
    made = {
        "header": _headers,
        "vocabulary": _vocabularies,
        "template": lambda: [x.encode() for x in TEMPLATES],
        "request": lambda: [json.dumps(x).encode() for x in REQUESTS],
        "stream": _streams,
    }[target]()
    return made + [path.read_bytes() for path in sorted((FOUND / target).glob("*"))]
