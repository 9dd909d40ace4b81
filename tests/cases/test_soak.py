"""The soak, scaled down: what is wrong in an hour is mostly wrong in seconds."""

import json
from pathlib import Path

from streamer.bench.soak import Sample, judge, main

TINY = Path(__file__).parents[1] / "data" / "tiny-llama.gguf"


def test_a_short_soak_is_flat_and_leaves_its_record(tmp_path: Path, capsys) -> None:
    times = ["--seconds", "5", "--quiet-every", "1.2", "--reload-every", "1.7", "--clients", "3"]
    place = ["--model", str(TINY), "--device", "host", "--ctx", "128", "--results", str(tmp_path)]
    slack = ["--slack", "10", "--memory-slack", "150"]  # seconds are too short for pools and arenas to fill
    code = main([*times, *place, *slack])
    assert code == 0, capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["benchmark"] == "soak"
    assert record["metrics"]["unexpected"] == 0
    assert record["metrics"]["reload"] >= 2
    assert record["metrics"]["cut"] > 3
    assert len(record["runs"]) >= 3


def test_what_grows_is_told() -> None:
    flat = [Sample(float(i), 100.0, 20, 10, 0, 0, 1e6, 0) for i in range(8)]
    assert judge(flat) == []
    grown = [Sample(float(i), 100.0 + 20 * i, 20 + 2 * i, 10 + i, i, 1, 1e6 + i, i) for i in range(8)]
    assert len(judge(grown)) == 7
