"""The record file and its parts."""

import json
from pathlib import Path

import pytest

from streamer.bench.record import Machine, new_record, read_commit, read_machine


def machine(gpu: str | None) -> Machine:
    return Machine(gpu, None, "cpu", 2, 8.0, "6.1", "3.11.0")


@pytest.mark.parametrize(
    ("gpu", "slug"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"), (None, "cpu-2")],
)
def test_machine_has_a_short_name_for_files(gpu: str | None, slug: str) -> None:
    assert machine(gpu).slug == slug


def test_record_is_one_file_named_by_benchmark_machine_and_date(tmp_path: Path) -> None:
    record = new_record(
        "decode", gpu=None, parameters={"a": 1}, metrics={"x": 1 / 3}, runs=[{"n": 1}], commit="c"
    )
    path = record.write(tmp_path)
    assert path.name == f"decode-{record.machine.slug}-{record.date}.json"
    found = json.loads(path.read_text())
    assert found["metrics"] == {"x": 0.33333}
    assert found["machine"]["cores"] >= 1
    assert found["runs"] == [{"n": 1}]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_metric_that_is_no_number_is_refused(tmp_path: Path, value: float) -> None:
    record = new_record("load", gpu=None, parameters={}, metrics={"ring_gbps": value}, commit="c")
    with pytest.raises(ValueError, match="ring_gbps"):
        record.write(tmp_path)


def test_this_machine_is_described() -> None:
    found = read_machine(None)
    assert found.cpu
    assert found.memory_gib > 0.1
    assert found.driver is None


def test_commit_is_a_word() -> None:
    assert read_commit()
