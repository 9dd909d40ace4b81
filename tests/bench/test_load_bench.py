"""The load benchmark on the host device: its arms run, its record has the agreed form, its table reads."""

import json
import shutil
from pathlib import Path

import pytest

from streamer.bench import load as load_bench
from streamer.bench.ready_arms import phase_seconds
from streamer.errors import ConfigError

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama.gguf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of its own, so that eviction disturbs no other test."""
    return Path(shutil.copy(MODEL, tmp_path / "tiny.gguf"))


def run(model: Path, out: Path, *arguments: str) -> tuple[int, dict]:
    command = [str(model), "--device", "host", "--out", str(out), "--chunk-mib", "0.0625", "--repeats", "1"]
    code = load_bench.main([*command, *arguments, "--commit", "abc"])
    (path,) = out.glob("load-*.json")
    return code, json.loads(path.read_text())


def test_warm_arms_write_a_record_and_a_picture(model: Path, tmp_path: Path, capsys) -> None:
    code, record = run(model, tmp_path / "out", "--arms", "link", "ring", "window", "kept", "verify")
    assert code == 0
    assert record["benchmark"] == "load"
    assert record["commit"] == "abc"
    assert set(record) == {"benchmark", "date", "commit", "machine", "parameters", "metrics", "runs"}
    names = {"gpu", "driver", "cpu", "cores", "memory_gib", "kernel", "python"}
    assert set(record["machine"]) == names
    promised = {
        "link_peak_gbps",
        "pageable_gbps",
        "ring_gbps",
        "ring_ratio",
        "ring_cpu_s_per_gib",
        "window_gbps",
    }
    promised |= {"window_cpu_s_per_gib", "kept_ratio", "pinned_mib", "host_rss_mib", "file_gb"}
    assert promised <= set(record["metrics"])
    assert all(isinstance(value, float) for value in record["metrics"].values())
    (picture,) = (tmp_path / "out").glob("*.svg")
    assert picture.read_text().startswith("<svg")
    assert "ring_ratio" in capsys.readouterr().out


def test_cold_arms_start_without_a_page_in_the_cache(model: Path, tmp_path: Path) -> None:
    try:
        code, record = run(model, tmp_path / "out", "--arms", "cold", "touch")
    except OSError as error:
        pytest.skip(f"this file system reads no file directly: {error}")
    failed = [r for r in record["runs"] if "error" in r]
    if code and all(
        "Invalid argument" in r["error"] or "stay in the page cache" in r["error"] for r in failed
    ):
        pytest.skip(f"this file system cannot: {failed}")
    assert code == 0
    assert {"cold_gbps", "odirect_gbps", "cold_ratio", "touch_ratio"} <= set(record["metrics"])
    ours = [r for r in record["runs"] if r["arm"] in ("cold ring", "cold touch")]
    assert len(ours) == 4
    assert all(r["storage_gb"] > 0 for r in ours)


def test_an_arm_that_fails_is_told_and_the_others_run(model: Path, tmp_path: Path, monkeypatch) -> None:
    def broken(setting, report) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(load_bench, "ARMS", {**load_bench.ARMS, "window": broken})
    code, record = run(model, tmp_path / "out", "--arms", "window", "link")
    assert code == 1
    assert {"arm": "window", "error": "OSError: no such luck"} in record["runs"]
    assert "link_peak_gbps" in record["metrics"]


NOTHING = "--repeats=0 --repeats=x --layers=0 --threads=-3 --streams=0 --ring-mib=0 --host-link=-1"
NOTHING += " --chunk-mib=0 --chunk-mib=-1 --chunk-mib=1e-9 --chunk-mib=nan --chunk-mib=inf"


@pytest.mark.parametrize("option", NOTHING.split())
def test_numbers_that_measure_nothing_are_usage_errors(model: Path, option: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        load_bench.main([str(model), "--device", "host", option])
    assert ended.value.code == 2
    assert f"argument {option.partition('=')[0]}: must be a" in capsys.readouterr().err


def test_place_and_device_are_refused_before_an_arm_runs(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(load_bench, "open_subject", None)
    with pytest.raises(ConfigError, match="--out: /proc/nope cannot be written: No such file") as caught:
        load_bench.main([str(model), "--device", "host", "--out", "/proc/nope"])
    assert caught.value.exit_code == 78
    with pytest.raises(ConfigError, match=r"device: must be auto, host, cuda or cuda:N, not 'nope'"):
        load_bench.main([str(model), "--device", "nope", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_part_of_the_layers_is_a_smaller_load(model: Path, tmp_path: Path) -> None:
    _, whole = run(model, tmp_path / "whole", "--arms", "link")
    _, part = run(model, tmp_path / "part", "--arms", "link", "--layers", "1")
    assert part["metrics"]["file_gb"] < whole["metrics"]["file_gb"]


def test_phases_are_read_from_the_metrics_page() -> None:
    name = "ggufd_load_phase_seconds"
    text = f'# HELP {name} x\n{name}{{phase="upload"}} 0.31\n{name}{{phase="warm"}} 2e-05\n'
    assert phase_seconds(text) == {"upload": 0.31, "warm": 0.0}
