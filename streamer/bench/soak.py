"""The soak: an hour of mixed load on a daemon, and what it holds at every quiet moment in between.

Clients do short, long, streamed, constrained, cut, half-sent and malformed requests; SIGHUP comes regularly,
every second time with a new file under the model's path, so that the model is loaded anew. From time to time
all clients rest until nothing runs, and the daemon is measured: what it holds then must stay what it held.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from streamer.bench.daemon import Daemon, running_daemon
from streamer.bench.meters import own_memory
from streamer.bench.record import RESULTS, new_record
from streamer.bench.soak_load import Client, Tally
from streamer.pull import pulled_path

MIB = 1 << 20
MEMORY_SLACK_MIB = (
    24.0  # growth from the run's second quarter to its last that counts as flat: arenas breathe
)


@dataclass(frozen=True)
class Sample:
    """The daemon at a quiet moment. Memory is of the daemon and its helpers."""

    at_s: float
    memory_mib: float
    descriptors: int
    threads: int
    pages_used: float
    sequences: float
    device_bytes: float
    pinned_bytes: float


def take_sample(daemon: Daemon, started_s: float) -> Sample:
    pids = [daemon.process.pid, *_children(daemon.process.pid)]
    metrics = _metrics(daemon)
    return Sample(
        at_s=round(time.monotonic() - started_s, 1),
        memory_mib=round(sum(map(own_memory, pids)) / MIB, 2),
        descriptors=len(os.listdir(f"/proc/{pids[0]}/fd")),
        threads=len(os.listdir(f"/proc/{pids[0]}/task")),
        pages_used=metrics['ggufd_kv_pages{state="used"}'],
        sequences=sum(v for k, v in metrics.items() if k.startswith("ggufd_sequences{")),
        device_bytes=metrics['ggufd_device_bytes{use="allocated"}'],
        pinned_bytes=metrics["ggufd_pinned_bytes"],
    )


def _children(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            found += [int(x) for x in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def _metrics(daemon: Daemon) -> dict[str, float]:
    lines = [line for line in str(daemon.get("/metrics")).splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def judge(samples: Sequence[Sample], slack: int = 2, memory_slack_mib: float = MEMORY_SLACK_MIB) -> list[str]:
    """What was not flat, in words; empty when all was. The first quarter is for warming up.

    `slack`: descriptors and threads more than then; pools come to their size with use.
    """
    begin, last = samples[len(samples) // 4], samples[-1]
    quarter = max(1, len(samples) // 4)
    early = max(s.memory_mib for s in samples[quarter : 2 * quarter] or samples[:1])
    late = max(s.memory_mib for s in samples[-quarter:])
    checks = (
        ("memory grew", late - early > memory_slack_mib, f"{early:.0f} -> {late:.0f} MiB"),
        ("descriptors leak", last.descriptors > begin.descriptors + slack, f"{begin} -> {last}"),
        ("threads leak", last.threads > begin.threads + slack, f"{begin} -> {last}"),
        ("pages leak", any(s.pages_used for s in samples), f"{[s.pages_used for s in samples]}"),
        ("sequences leak", any(s.sequences for s in samples), f"{[s.sequences for s in samples]}"),
        ("device bytes changed", last.device_bytes != begin.device_bytes, f"{begin} -> {last}"),
        ("pinned bytes changed", last.pinned_bytes != begin.pinned_bytes, f"{begin} -> {last}"),
    )
    return [f"{what}: {detail}" for what, is_so, detail in checks if is_so]


class Soak:
    """One run over a daemon that serves `model`, which is a file of ours to replace."""

    def __init__(self, daemon: Daemon, model: Path, n_clients: int, n_ctx: int) -> None:
        self._daemon, self._model = daemon, model
        self.tally = Tally()
        self.samples: list[Sample] = []
        self.probe_s: list[float] = []
        self._clients = [Client(daemon.socket_path, i, self.tally, n_ctx) for i in range(n_clients)]

    def run(self, seconds: float, quiet_every_s: float, reload_every_s: float) -> None:
        started_s = time.monotonic()
        self._quiet(started_s)
        next_quiet, next_reload = started_s + quiet_every_s, started_s + reload_every_s
        while (now := time.monotonic()) < started_s + seconds:
            if now >= next_reload:
                self._reload()
                next_reload = now + reload_every_s
            elif now >= next_quiet:
                self._quiet(started_s)
                next_quiet = time.monotonic() + quiet_every_s
            else:
                self._probe()
                time.sleep(0.05)
        self._quiet(started_s)

    def close(self) -> None:
        for client in self._clients:
            client.over.set()
        for client in self._clients:
            client.thread.join()

    def _probe(self) -> None:
        began_s = time.perf_counter()
        self._daemon.get("/livez")
        self.probe_s.append(time.perf_counter() - began_s)

    def _reload(self) -> None:
        """Every second one swaps the model's file for an equal copy: everything is loaded anew."""
        self.tally.add("reload")
        if self.tally.done["reload"] % 2 == 0:
            copy = self._model.with_name("next")
            shutil.copy(self._model, copy)
            copy.rename(self._model)
            self.tally.add("model reload")
        self._daemon.process.send_signal(signal.SIGHUP)

    def _quiet(self, started_s: float) -> None:
        """All rest; wait until nothing runs; measure."""
        for client in self._clients:
            client.rest.set()
        for client in self._clients:
            client.resting.wait(180)
        deadline = time.monotonic() + 120
        while not self._is_idle() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.samples.append(take_sample(self._daemon, started_s))
        for client in self._clients:
            client.rest.clear()
            client.resting.clear()

    def _is_idle(self) -> bool:
        """Ready, and nothing runs. While a model is being loaded there are no pages to speak of."""
        if self._daemon.get("/readyz")["status"] != "ready":
            return False
        metrics = _metrics(self._daemon)
        busy = sum(v for k, v in metrics.items() if k.startswith("ggufd_sequences{"))
        return not busy and metrics.get('ggufd_kv_pages{state="used"}') == 0


@contextlib.contextmanager
def own_copy(model: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ggufd-soak-") as folder:
        yield Path(shutil.copy(pulled_path(model) or model, Path(folder) / "model.gguf"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write the record; 1 when something was not flat or an answer was wrong."""
    options = _parse(arguments)
    with own_copy(options.model) as model:
        flags = ["--ctx", str(options.ctx), "--log-level", "warning"]
        with running_daemon(str(model), device=options.device, options=flags) as daemon:
            gpu = daemon.get("/readyz")["device"]
            soak = Soak(daemon, model, options.clients, options.ctx)
            try:
                soak.run(options.seconds, options.quiet_every, options.reload_every)
            finally:
                soak.close()
            stop_s = daemon.stop()
            code = daemon.process.returncode
    wrong = judge(soak.samples, options.slack, options.memory_slack) + soak.tally.unexpected
    if code != 0:
        wrong.append(f"the daemon ended with {code}")
    metrics = summary(soak, options.seconds, stop_s)
    for name, value in metrics.items():
        print(f"{name}: {value:g}")
    for text in wrong:
        print(f"WRONG: {text}")
    if options.record:
        device = None if gpu == "host" else gpu.partition(" ")[2]
        runs = [asdict(s) for s in soak.samples]
        record = new_record("soak", gpu=device, parameters=vars(options), metrics=metrics, runs=runs)
        print(record.write(Path(options.results)))
    return 1 if wrong else 0


def summary(soak: Soak, seconds: float, stop_s: float) -> dict[str, float]:
    done, first, last = soak.tally.done, soak.samples[len(soak.samples) // 4], soak.samples[-1]
    probes = sorted(soak.probe_s) or [0.0]
    found: dict[str, float] = {"seconds": seconds, "generated_tokens": soak.tally.tokens, "stop_s": stop_s}
    found |= {name.replace(" ", "_"): n for name, n in sorted(done.items())}
    found["requests"] = sum(n for name, n in done.items() if "reload" not in name)
    found["unexpected"] = done["unexpected"]
    for name in ("memory_mib", "descriptors", "threads", "device_bytes", "pinned_bytes"):
        found[f"{name}_begin"], found[f"{name}_end"] = getattr(first, name), getattr(last, name)
    found["memory_mib_max"] = max(s.memory_mib for s in soak.samples)
    found["pages_used_end"], found["sequences_end"] = last.pages_used, last.sequences
    found["livez_p99_ms"] = 1e3 * probes[int(len(probes) * 0.99) - 1]
    found["livez_max_ms"] = 1e3 * probes[-1]
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a pulled name")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--quiet-every", type=float, default=20.0, help="seconds between measurements")
    parser.add_argument("--reload-every", type=float, default=30.0)
    parser.add_argument(
        "--slack", type=int, default=2, help="more descriptors and threads that count as flat"
    )
    parser.add_argument(
        "--memory-slack", type=float, default=MEMORY_SLACK_MIB, help="MiB more that count as flat"
    )
    parser.add_argument("--results", default=str(RESULTS))
    parser.add_argument("--no-record", dest="record", action="store_false")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
