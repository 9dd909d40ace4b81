"""docs/cases.md names fifty cases, and tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "cases.md").read_text()


def test_every_case_has_its_row() -> None:
    assert re.findall(r"^\| (\d+) \|", TABLE, re.M) == [str(n) for n in range(1, 51)]


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE))
    assert len(named) > 100
    texts = {file: (ROOT / file).read_text() for file, _ in named}
    assert {n for n in named if f"def {n[1]}(" not in texts[n[0]]} == set()
