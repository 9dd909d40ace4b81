"""The residency bar, and waiting for readiness with it."""

import os
import sys
import time
from typing import Any

from streamer.cli.probe import Unreachable, amount, get_residency

POLL_S = 0.05


def wait_ready(
    socket_path: str,
    deadline: float | None = None,
    *,
    pid: int | None = None,
    patience_s: float | None = None,
    lines: bool = False,
) -> dict[str, Any]:
    """Poll until ready, failed, or `deadline` on time.monotonic; returns the last account.

    Shows a bar on stderr when that is a terminal; `lines`: a line a step elsewhere. Before the first answer
    the socket may not exist yet; the end of process `pid`, or `patience_s` without any answer, ends the wait
    (Unreachable).
    """
    alone = None if patience_s is None else time.monotonic() + patience_s
    with ResidencyBar(lines=lines) as bar:
        while True:
            residency = None
            try:
                residency = get_residency(socket_path)
            except Unreachable:
                if _is_gone(pid) or _is_over(deadline) or _is_over(alone):
                    raise
            if residency is not None:
                alone = None
                bar.show(residency)
                if residency["status"] in ("ready", "failed") or _is_over(deadline):
                    return residency
            time.sleep(POLL_S)


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


def _is_gone(pid: int | None) -> bool:
    """True when our child `pid` has ended (it stays a zombie until waited for)."""
    return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class ResidencyBar:
    """A rich bar on a terminal; elsewhere nothing or, with `lines`, a line for every phase and tenth."""

    def __init__(self, *, lines: bool = False) -> None:
        self._shown = sys.stderr.isatty()
        self._lines = lines and not self._shown
        self._told: object = None
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> "ResidencyBar":
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description:>8}"),
                BarColumn(40),
                TextColumn("{task.percentage:>5.1f} %"),
                TextColumn("{task.fields[detail]}"),
            )
            self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=20)
            self._task = self._progress.add_task("start", total=1.0, detail="")
            self._progress.start()
        return self

    def show(self, r: dict[str, Any]) -> None:
        detail = f"{amount(r['bytes_resident'])} of {amount(r['bytes_total'])}, {amount(r['bytes_per_s'])}/s"
        detail += f", layer {r['layers_resident']}/{r['layers_total']}"
        if self._progress is not None:
            self._progress.update(self._task, completed=r["fraction"], description=r["phase"], detail=detail)
        elif self._lines and self._told != (step := (r["phase"], int(r["fraction"] * 10))):
            self._told = step
            done = "#" * int(r["fraction"] * 40)
            line = f"{r['phase']:>8} [{done:-<40}] {r['fraction']:6.1%}  {detail}"
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
