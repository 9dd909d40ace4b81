"""docs/internals.md and the README name what exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERNALS = (ROOT / "docs" / "internals.md").read_text()
README = (ROOT / "README.md").read_text()


def test_every_invariant_has_its_tests_and_they_exist() -> None:
    rows = re.findall(r"^\| (\d+)\. .*$", INTERNALS, re.M)
    assert rows == [str(n) for n in range(1, 12)]
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", INTERNALS))
    texts = {file: (ROOT / file).read_text() for file, _ in named}
    assert {n for n in named if f"def {n[1]}(" not in texts[n[0]]} == set()


def test_files_that_are_named_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|md|cu|toml))`", INTERNALS + README))
    rooms = ("streamer", "kernels", "tests", "docs", "deploy", "benchmarks")
    there = {"/" + p.relative_to(ROOT).as_posix() for room in rooms for p in (ROOT / room).rglob("*.*")}
    there |= {f"/{p.name}" for p in ROOT.iterdir()}
    examples = {"models/NAME.py", "transfer/NAME.py", "device/NAME.py", "kernels/X.py", "X.cu"}
    examples.add("streamer/models/NAME.py")
    assert {n for n in named - examples if not any(x.endswith("/" + n) for x in there)} == set()
