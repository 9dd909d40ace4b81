"""Bad luck from outside: kills, full tables, disks that fail, files that change, clocks that jump, crowds."""

import os
import random
import resource
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from case_builder import TOKENS, scripted
from case_daemon import message, patient

A = TOKENS.index("a")
GOOD = {"prompt": [A], "max_tokens": 3, "temperature": 0}


def answers(daemon) -> bool:
    try:
        status, answer = daemon.complete(**GOOD)
    except ConnectionError:
        return False
    return status == 200 and answer["choices"][0]["text"] == "bcd"


def until(question, seconds: float = 20.0):
    deadline = time.monotonic() + patient(seconds)
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return answer


def test_killed_at_twenty_points_the_next_start_works_at_once(nursery, tmp_path: Path) -> None:
    """Ten points of a load, ten of serving, on one socket path; each start is the next one's victim."""
    from case_daemon import Daemon

    model = scripted(n_ctx=8192, endless=True).write(tmp_path / "m.gguf")
    place, chance = tmp_path / "s", random.Random(7)
    for point in range(21):
        options = ("--socket", str(place), *(("--host-link-bytes-per-s", "400000") if point % 2 else ()))
        daemon = Daemon(nursery, tmp_path / f"d{point}", model, options, ready=point % 2 == 0)
        daemon.path = str(place)
        until(lambda d=daemon: listening(d), 2.0)
        assert daemon.get("/livez")[0] == 200
        if point == 20:
            assert answers(daemon)
            assert daemon.stop() == 0
            assert not place.exists()
        elif point % 2:
            time.sleep(chance.uniform(0, 0.3))
        else:
            client = daemon.connect()
            body = b'{"prompt": [8], "max_tokens": 8000, "stream": true}'
            client.sendall(message("POST", "/v1/completions", body))
            client.recv(chance.randrange(1, 20_000))
            client.close()
        daemon.close()


def listening(daemon) -> bool:
    try:
        daemon.connect().close()
    except OSError:
        return False
    return True


@pytest.fixture
def loading(launch, smollm2_path: Path, tmp_path: Path):
    """(daemon in mid-load, its own copy of the model)."""

    def start(*options: str):
        model = Path(shutil.copy(smollm2_path, tmp_path / "m.gguf"))
        rate = (
            "--host-link-bytes-per-s",
            "60000000",
            "--ring-mib",
            "8",
            "--ctx",
            "256",
            "--max-sequences",
            "1",
        )
        daemon = launch(model, *rate, *options, ready=False)
        until(lambda: listening(daemon))
        until(lambda: daemon.get("/readyz")[1]["fraction"] > 0.2)
        return daemon, model

    return start


def test_case_15_a_file_truncated_in_mid_load(loading) -> None:
    daemon, model = loading()
    os.truncate(model, 40_000_000)
    assert daemon.wait() == 65, daemon.text
    assert daemon.text.splitlines()[-1].startswith(f"ggufd: {model}: ")
    assert "truncated" in daemon.text.splitlines()[-1]
    assert not any(x.startswith("READY") for x in daemon.told)


def test_a_file_overwritten_in_mid_load_is_noticed(loading) -> None:
    daemon, model = loading()
    with model.open("r+b") as writing:
        writing.seek(-4096, os.SEEK_END)
        writing.write(bytes(4096))
    assert daemon.wait() == 65, daemon.text
    assert "was written to" in daemon.text.splitlines()[-1]


def test_a_file_replaced_or_removed_in_mid_load_is_served_as_it_was(loading) -> None:
    daemon, model = loading("--verify")
    other = model.with_name("other")
    other.write_bytes(b"GGUF nonsense")
    other.rename(model)
    daemon.wait_told("READY=1")
    assert daemon.get("/readyz")[1]["verified"]
    assert daemon.complete(prompt="The sky is", max_tokens=1)[0] == 200


def test_a_disk_error_is_attributed(launch, tmp_path: Path) -> None:
    model = scripted().write(tmp_path / "m.gguf")
    daemon = launch(model, ready=False, change="fail_reading")
    assert daemon.wait() == 65
    assert daemon.text.splitlines()[-1].startswith(f"ggufd: {model}: ")
    assert "Input/output error" in daemon.text


def test_clocks_that_jump_change_nothing(launch, tmp_path: Path) -> None:
    daemon = launch(
        scripted().write(tmp_path / "m.gguf"), change="jump_clocks", env={"WATCHDOG_USEC": "400000"}
    )
    for _ in range(20):
        status, answer = daemon.complete(**GOOD)
        assert status == 200
        assert 0 <= answer["ggufd"]["ttft_ms"] < 60_000
        assert 0 <= answer["ggufd"]["decode_ms"] < 60_000
    assert daemon.stop() == 0


def test_a_full_descriptor_table_is_survived(launch, tmp_path: Path) -> None:
    daemon = launch(scripted().write(tmp_path / "m.gguf"))
    used = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 8, used + 8))
    crowd = [daemon.connect() for _ in range(40)]  # the kernel's backlog takes them; accept fails with EMFILE
    until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) >= used + 7)
    before = cpu_s(daemon.pid)
    time.sleep(0.3)  # nothing to wait for: it must do nothing
    assert cpu_s(daemon.pid) - before < 0.25, "it spins on accept"
    for client in crowd:
        client.close()
    until(lambda: answers(daemon))
    assert daemon.get("/readyz")[0] == 200
    assert daemon.stop() == 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_five_hundred_connections_ask_at_once(launch, tmp_path: Path) -> None:
    """Each gets its answer or 429; nothing is left of them."""
    daemon = launch(scripted().write(tmp_path / "m.gguf"))
    body = b'{"prompt": [8], "max_tokens": 3, "temperature": 0}'
    clients = [daemon.connect(60) for _ in range(500)]
    for client in clients:
        client.sendall(message("POST", "/v1/completions", body))
    found = [b"".join(iter(lambda c=c: c.recv(65536), b"")) for c in clients]
    for client in clients:
        client.close()
    codes = {int(x.split()[1]) for x in found}
    assert codes <= {200, 429}
    assert sum(b'"text":"bcd"' in x for x in found) >= 250
    until(lambda: daemon.metric('ggufd_kv_pages{state="used"}') == 0)
    assert daemon.metric("ggufd_connections") <= 2


def test_hung_clients_hold_nobody_up(launch, tmp_path: Path) -> None:
    """One says nothing, one stops in its header, one in its body, one never reads its stream."""
    daemon = launch(scripted(n_ctx=8192, endless=True).write(tmp_path / "m.gguf"), "--write-timeout", "0.5")
    whole = message("POST", "/v1/completions", b'{"prompt": [8], "max_tokens": 8000, "stream": true}')
    clients = [daemon.connect() for _ in range(4)]
    for client, part in zip(clients, (b"", whole[:20], whole[:-5], whole), strict=True):
        client.sendall(part)
    for _ in range(20):
        assert answers(daemon)
    until(lambda: daemon.metric('ggufd_sequences{state="decoding"}') == 0)  # who does not read is dropped
    for client in clients:
        client.close()


def test_a_reload_with_a_bad_file_keeps_what_serves(launch, tmp_path: Path) -> None:
    """Refused like at a start, but the model that is resident serves on; a good file then replaces it."""
    model = scripted().write(tmp_path / "m.gguf")
    daemon = launch(model)
    bad = tmp_path / "bad"
    bad.write_bytes(model.read_bytes()[:-1000])
    bad.rename(model)
    reload(daemon)
    assert answers(daemon)
    assert daemon.get("/readyz")[0] == 200
    scripted([A, TOKENS.index("z"), 2]).write(tmp_path / "new").rename(model)
    reload(daemon)
    until(lambda: daemon.get("/readyz")[0] == 200)
    assert daemon.complete(**GOOD)[1]["choices"][0]["text"] == "z"
    assert daemon.stop() == 0
    assert daemon.told.count("READY=1") == 3


def reload(daemon) -> None:
    ready = daemon.told.count("READY=1")
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: daemon.listen(0.05) and daemon.told.count("READY=1") > ready)


def test_requests_during_a_reload_are_answered_or_told(launch, tmp_path: Path) -> None:
    model = scripted().write(tmp_path / "m.gguf")
    daemon = launch(model)
    codes: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            codes.append(daemon.complete(**GOOD)[0])

    asker = threading.Thread(target=ask)
    asker.start()
    for n in range(3):
        until(lambda n=n: codes.count(200) > n)
        scripted().write(tmp_path / "new").rename(model)
        reload(daemon)
    over.set()
    asker.join()
    assert set(codes) <= {200, 503}, (Counter(codes), daemon.text[-3000:])
    assert answers(daemon)
