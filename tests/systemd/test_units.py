"""The shipped units under a real systemd: order of notifications, patience, watchdog, activation, access."""

import re
import socket

import pytest
from systemd_box import until

SMOLLM2 = "/srv/ggufd/smollm2.gguf"
TINY = "/srv/ggufd/tiny.gguf"
LINK_BYTES_PER_S = 12_000_000  # SmolLM2 then takes about eight seconds
PATIENCE_S = 5  # and a start without progress may take this long
OPEN_BY_INTENT = {  # docs/operating.md gives the reasons
    "PrivateDevices=",
    "DeviceAllow=",
    "ProcSubset=",
    "PrivateUsers=",
    "RestrictAddressFamilies=~AF_UNIX",
    "SystemCallFilter=~@resources",
    "RootDirectory=/RootImage=",
}


def kinds(notifications: list[str]) -> list[str]:
    """Each message by what it is about, repetitions joined."""
    found: list[str] = []
    for message in notifications:
        keys = {part.split("=")[0] for part in message.split(", ")}
        for kind in ("READY", "RELOADING", "STOPPING", "WATCHDOG", "EXTEND_TIMEOUT_USEC", "STATUS"):
            if kind in keys:
                found += [kind] if found[-1:] != [kind] else []
                break
    return found


def test_a_life_under_systemd(make_unit) -> None:
    """Activated by a request, loading for longer than TimeoutStartSec, ready, reloaded, stopped (case 45)."""
    unit = make_unit(
        "life",
        {"model": SMOLLM2, "host_link_bytes_per_s": LINK_BYTES_PER_S, "ctx": 512, "max_sequences": 1},
        TimeoutStartSec=PATIENCE_S,
        WatchdogSec=10,
    )
    unit.box.run("systemctl", "start", unit.socket)
    assert unit.show("ActiveState")["ActiveState"] == "inactive"

    status, body = unit.get("/livez")  # this connection starts the daemon
    assert (status, body) == (200, {"status": "ok"})
    assert unit.show("ActiveState")["ActiveState"] == "activating"
    status, residency = unit.get("/readyz")
    assert (status, residency["status"]) == (503, "loading")
    status, refusal = unit.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2})  # case 44
    assert (status, refusal["error"]["message"]) == (503, "Loading model")

    loading = until(
        lambda: re.match(
            r"loading \(upload\): \d+ of \d+ bytes \([1-9]", unit.show("StatusText")["StatusText"]
        ),
        "a STATUS with progress",
        20,
        unit,
    )
    assert loading
    unit.wait("ActiveState", "active", 90)
    shown = unit.show("ActiveEnterTimestampMonotonic", "InactiveExitTimestampMonotonic", "StatusText")
    times = [int(shown[f"{name}TimestampMonotonic"]) for name in ("InactiveExit", "ActiveEnter")]
    assert (times[1] - times[0]) / 1e6 > PATIENCE_S, "the load outlived TimeoutStartSec"
    assert shown["StatusText"].startswith("serving ")
    status, answer = unit.post("/v1/completions", {"prompt": "The sky is", "max_tokens": 3})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["ggufd"]["weight_h2d_bytes"] == 0

    unit.systemctl("reload")
    until(lambda: kinds(unit.box.notifications(unit.service)).count("READY") == 2, "a reload", 20, unit)
    assert unit.get("/readyz")[0] == 200
    unit.systemctl("stop")
    result = unit.show("Result", "NRestarts", "ExecMainStatus")
    assert result == {"Result": "success", "NRestarts": "0", "ExecMainStatus": "0"}

    told = kinds(unit.box.notifications(unit.service))
    first_ready = told.index("READY")
    assert "EXTEND_TIMEOUT_USEC" in told[:first_ready]
    assert "EXTEND_TIMEOUT_USEC" not in told[first_ready:]
    assert told[first_ready:].index("RELOADING") < told[first_ready + 1 :].index("READY") + 1
    assert "WATCHDOG" in told
    assert told[-1] == "STOPPING"
    assert told.count("STOPPING") == 1


def test_a_stalled_load_is_granted_no_time(make_unit) -> None:
    """The twin of patience: no byte moves, so the manager hears of the stall and of no extension."""
    config = {"model": SMOLLM2, "host_link_bytes_per_s": 1000, "ctx": 512, "max_sequences": 1}
    unit = make_unit("stalled", config)
    unit.box.run("systemctl", "start", "--no-block", unit.service)

    def silent() -> bool:
        told = unit.box.notifications(unit.service)
        statuses = [x for x in told if x.startswith("STATUS=loading (upload)")]
        return len(statuses) > 8 and not any("EXTEND_TIMEOUT_USEC" in x for x in statuses[-4:])

    until(silent, "STATUS without EXTEND_TIMEOUT_USEC", 30, unit)
    unit.systemctl("stop")
    assert unit.show("Result")["Result"] == "success"
    assert "READY" not in kinds(unit.box.notifications(unit.service))


def test_a_hung_and_a_killed_daemon_are_started_again_on_the_same_socket(make_unit, stop_process) -> None:
    unit = make_unit("hung", {"model": TINY}, WatchdogSec=2, RestartSec=0)
    unit.systemctl("start")
    pids = [unit.show("MainPID")["MainPID"]]
    socket_inode = unit.box.path(unit.socket_path).stat().st_ino
    stop_process(unit)
    unit.wait("NRestarts", "1")
    unit.wait("ActiveState", "active")
    assert "watchdog timeout" in unit.box.journal(unit.service).lower()
    pids.append(unit.show("MainPID")["MainPID"])
    unit.box.run("kill", "-9", pids[-1])
    assert unit.get("/livez")[0] == 200  # waits on the manager's socket meanwhile
    unit.wait("NRestarts", "2")
    unit.wait("ActiveState", "active")
    pids.append(unit.show("MainPID")["MainPID"])
    assert len(set(pids)) == 3
    assert unit.box.path(unit.socket_path).stat().st_ino == socket_inode
    assert unit.get("/readyz")[0] == 200


@pytest.mark.parametrize(
    ("name", "config", "code"),
    [
        ("cut", {"model": "/srv/ggufd/cut.gguf"}, 65),
        ("badvalue", {"model": TINY, "max_queue": -1}, 78),
        ("nomodel", {}, 2),
    ],
)
def test_what_does_not_mend_itself_is_not_restarted(make_unit, box, name: str, config, code: int) -> None:
    whole = box.path(TINY).read_bytes()
    box.path("/srv/ggufd/cut.gguf").write_bytes(whole[:-1000])
    unit = make_unit(name, config)
    unit.systemctl("start", check=False)
    unit.wait("ActiveState", "failed")
    shown = unit.show("ExecMainStatus", "NRestarts", "Result")
    assert shown == {"ExecMainStatus": str(code), "NRestarts": "0", "Result": "exit-code"}
    assert "Traceback" not in unit.box.journal(unit.service)
    assert "READY" not in kinds(box.notifications(unit.service))


def test_a_missing_device_is_tried_again(make_unit) -> None:
    """The twin: a driver may come later."""
    unit = make_unit("nogpu", {"model": TINY, "device": "cuda:99"}, RestartSec=0)
    unit.systemctl("start", check=False)
    unit.wait("NRestarts", "1")
    assert unit.show("ExecMainStatus")["ExecMainStatus"] in ("69", "0")


def test_the_socket_is_for_its_group_and_the_allow_list_sees_real_users(make_unit, box) -> None:
    unit = make_unit("listed", {"model": TINY, "allow_uid": [4711]})
    unit.systemctl("start")
    shown = box.path(unit.socket_path).stat()
    group = box.run("getent", "group", "ggufd").stdout.split(":")[2]
    assert (oct(shown.st_mode & 0o777), str(shown.st_gid), shown.st_uid) == ("0o660", group, 0)

    def ask(uid: int, groups: str) -> str:
        client = ("/usr/local/bin/ggufd", "status", "--json", "--socket", unit.socket_path)
        run = box.run("setpriv", f"--reuid={uid}", "--regid=4711", groups, *client, check=False)
        assert (run.returncode == 0) == ('"ready"' in run.stdout)
        return run.stdout + run.stderr

    assert "Permission denied" in ask(4711, "--clear-groups")
    assert '"ready"' not in ask(4712, f"--groups={group}")
    assert '"ready"' in ask(4711, f"--groups={group}")


def test_tcp_through_the_drop_in_asks_for_the_key_that_only_the_daemon_can_read(make_unit, box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:  # the box has this machine's network
        port = probe.getsockname()[1]
    unit = make_unit("tcp", {"model": TINY, "listen": f"127.0.0.1:{port}"})
    box.write("/etc/ggufd/tcp.keys", "a-key-of-sixteen-letters\n")
    box.path("/etc/ggufd/tcp.keys").chmod(0o600)
    drop_in = box.path("/usr/local/share/ggufd/tcp.conf").read_text()
    box.write(f"/etc/systemd/system/{unit.service}.d/tcp.conf", drop_in)
    box.run("systemctl", "daemon-reload")
    unit.systemctl("start")

    def ask(*headers: str) -> int:
        lines = ["GET /v1/models HTTP/1.0", f"Host: 127.0.0.1:{port}", *headers, "", ""]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall("\r\n".join(lines).encode())
            return int(client.recv(65536).split()[1])

    assert ask() == 401
    assert ask("Authorization: Bearer a-key-of-sixteen-letters") == 200
    assert unit.get("/v1/models")[0] == 200  # the socket asks for none


def test_units_verify_and_are_closed_but_for_the_devices(make_unit, box) -> None:
    unit = make_unit("closed", {"model": TINY})
    verified = box.run("systemd-analyze", "verify", unit.service, unit.socket, "ggufd-nvidia.service")
    assert verified.stdout + verified.stderr == ""
    told = box.run("systemd-analyze", "security", "--no-pager", unit.service).stdout
    score = re.search(r"exposure level for .*: ([\d.]+)", told)
    assert score is not None
    assert float(score[1]) < 1.0, told
    left_open = {line.split()[1] for line in told.splitlines() if line.startswith("✗")}
    assert left_open <= OPEN_BY_INTENT, left_open - OPEN_BY_INTENT


def test_uninstalling_leaves_nothing_but_what_is_the_operators(make_unit, box) -> None:
    unit = make_unit("leaving", {"model": TINY})
    box.run("systemctl", "enable", "--now", unit.socket)
    wrapper = box.path("/usr/local/bin/ggufd").read_text()
    try:
        box.run("/opt/src/deploy/uninstall.sh")
        left = box.run("sh", "-c", "find /usr/local -name '*ggufd*'; ls /run/ggufd").stdout
        assert left == ""
        assert unit.show("LoadState", "ActiveState") == {"LoadState": "not-found", "ActiveState": "inactive"}
        assert box.path(unit.config_path).exists()
    finally:
        box.write("/usr/local/bin/ggufd", wrapper)
        box.path("/usr/local/bin/ggufd").chmod(0o755)
        box.run("/opt/src/deploy/install.sh", "--units-only")
