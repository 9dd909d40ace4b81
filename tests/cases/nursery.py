"""A process that has imported the daemon and forks it on demand: a start without the second of imports.

Run as a program: reads one JSON command a line, answers one JSON line.
  {"args": [...], "env": {...}, "log": PATH, "change": NAME or null, "memory": bytes or null}  -> {"pid": N}
  {"wait": PID, "seconds": S} -> {"code": exit code, -signal or null, "peak_kib": ...}
`change` names a function of changes.py that alters the daemon before it runs.
"""

import gc
import json
import os
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import Any

CHANGES = Path(__file__).with_name("changes.py")


def child(command: dict[str, Any]) -> int:
    output = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(command["env"])
    if command["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (command["memory"], command["memory"]))
    if command["change"]:
        runpy.run_path(str(CHANGES))[command["change"]]()
    from streamer.cli import run
    from streamer.process import hold_signals
    from streamer.service import serve

    return run(lambda config: serve(config, hold_signals()), command["args"])


def fork(command: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        code = child(command)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return {"code": os.waitstatus_to_exitcode(status), "peak_kib": usage.ru_maxrss}
        time.sleep(0.002)
    return {"code": None, "peak_kib": 0}


def main() -> None:
    import streamer.cli.inspect
    import streamer.cli.serve
    import streamer.device.host
    import streamer.kernels.host_executor
    import streamer.service  # noqa: F401

    gc.freeze()
    print(json.dumps({"peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        waiting = "wait" in command
        answer = wait(command["wait"], command["seconds"]) if waiting else {"pid": fork(command)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
