"""What memory the host can still give: MemAvailable, cgroup limits. Page cache never counts as used."""

from pathlib import Path, PurePosixPath

from streamer.device.base import MemoryInfo


def host_memory(root: Path = Path("/")) -> MemoryInfo:
    """Free and total bytes, the tightest of the machine and each enclosing cgroup (v2 or v1)."""
    meminfo = _fields(_read(root / "proc/meminfo"))
    free, total = meminfo.get("MemAvailable", meminfo.get("MemFree", 0)), meminfo.get("MemTotal", 0)
    for limit, used in _cgroup_levels(root):
        free, total = min(free, max(limit - used, 0)), min(total, limit)
    return MemoryInfo(free=free, total=total)


def _cgroup_levels(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes used without page cache) of each cgroup from ours to the root that has a limit."""
    levels = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, reader = root / "sys/fs/cgroup", _level_v2
        elif "memory" in controllers.split(","):
            base, reader = root / "sys/fs/cgroup/memory", _level_v1
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for directory in (group, *group.parents):
            level = reader(base / directory)
            if level is not None:
                levels.append(level)
    return levels


def _level_v2(directory: Path) -> tuple[int, int] | None:
    limit, current = _read(directory / "memory.max").strip(), _read(directory / "memory.current").strip()
    if not limit.isdigit() or not current.isdigit():
        return None  # "max", or no such file: no limit here
    stat = _fields(_read(directory / "memory.stat"))
    return int(limit), int(current) - (stat.get("file", 0) - stat.get("shmem", 0))


def _level_v1(directory: Path) -> tuple[int, int] | None:
    limit = _read(directory / "memory.limit_in_bytes").strip()
    usage = _read(directory / "memory.usage_in_bytes").strip()
    if not limit.isdigit() or not usage.isdigit():
        return None
    stat = _fields(_read(directory / "memory.stat"))
    return int(limit), int(usage) - (stat.get("total_cache", 0) - stat.get("total_shmem", 0))


def _fields(text: str) -> dict[str, int]:
    """`Name: 123 kB` and `name 123` lines as bytes."""
    fields = {}
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return fields


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not there, not ours to read: no limit known from it
