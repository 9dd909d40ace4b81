"""What is shipped beside the units: staged installs, metrics and options that exist, manifests that parse."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from streamer.config import load_config
from streamer.server.metrics import Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def staged(tmp_path: Path, **environment: str) -> set[str]:
    """Files of an install below DESTDIR, without the virtual environment (that takes the network)."""
    env = {**os.environ, "DESTDIR": str(tmp_path), **environment}
    subprocess.run([DEPLOY / "install.sh", "--units-only"], env=env, check=True, capture_output=True)
    return {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("prefix", "units"), [("/usr/local", "usr/local/lib/systemd/system"), ("/usr", "usr/lib/systemd/system")]
)
def test_an_install_can_be_staged_and_taken_back(tmp_path: Path, prefix: str, units: str) -> None:
    files = staged(tmp_path, PREFIX=prefix, NOTIFY_RELOAD="yes")
    assert {f"{units}/ggufd@.service", f"{units}/ggufd@.socket", f"{units}/ggufd-nvidia.service"} <= files
    assert f"{units}/ggufd@.service.d/notify-reload.conf" in files
    unit = (tmp_path / units / "ggufd@.service").read_text()
    assert f"ExecStart={prefix}/bin/ggufd serve --config" in unit
    assert "@BINDIR@" not in unit
    env = {**os.environ, "DESTDIR": str(tmp_path), "PREFIX": prefix}
    subprocess.run([DEPLOY / "uninstall.sh"], env=env, check=True, capture_output=True)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_an_older_systemd_gets_plain_notify(tmp_path: Path) -> None:
    assert not any("notify-reload" in name for name in staged(tmp_path, NOTIFY_RELOAD="no"))


def test_the_example_configuration_loads_with_every_line_uncommented(tmp_path: Path) -> None:
    text = (DEPLOY / "example.toml").read_text()
    plain = tmp_path / "plain.toml"
    plain.write_text(text)
    assert load_config({}, environ={}, file=str(plain)).model == "/srv/ggufd/model.gguf"
    full = "\n".join(re.sub(r"^# (\w+ = )", r"\1", line) for line in text.splitlines())
    names = set(tomllib.loads(full))
    assert len(names) > 8
    plain.write_text(full.replace("listen = ", "no_auth = true\nlisten = "))
    load_config({}, environ={}, file=str(plain))


def shipped_expressions() -> str:
    dashboard = json.loads((DEPLOY / "grafana" / "ggufd.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    return "\n".join([*expressions, *re.findall(r"expr: (.*)", alerts)])


def test_dashboard_and_alerts_use_metrics_that_exist() -> None:
    from streamer.runtime.account import Snapshot

    shown = Metrics(Snapshot, lambda: (0, 0)).render().decode()
    known = set(re.findall(r"# TYPE (\w+) ", shown))
    used = set(re.findall(r"ggufd_\w+", shipped_expressions()))
    assert len(used) > 12
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert {b for b in bases if b not in known and b.removesuffix("_total") not in known} == set()


def test_every_directive_left_open_in_the_unit_has_its_reason() -> None:
    unit = (DEPLOY / "systemd" / "ggufd@.service").read_text()
    for directive in ("PrivateDevices=no", "PrivateUsers=no", "ProcSubset=all"):
        before = unit[: unit.index(directive)].splitlines()
        assert any(line.startswith("#") for line in before[-3:]), directive


@pytest.mark.parametrize("path", [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")], ids=lambda p: p.name)
def test_manifests_parse(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert yaml.safe_load(path.read_text())
