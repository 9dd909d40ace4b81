"""How much memory the host can give: the tightest of machine and cgroups, page cache not counted as used."""

from pathlib import Path

import pytest

from streamer.device.base import MemoryInfo
from streamer.device.host import HostDevice
from streamer.device.host_memory import host_memory
from streamer.errors import DeviceMemoryError

GIB = 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\nCached: 7000000 kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_cgroup_limit_available_memory_counts(tmp_path) -> None:
    assert host_memory(machine(tmp_path, {})) == MemoryInfo(free=8 * GIB, total=16 * GIB)


def test_cgroup_v2_limit_without_its_page_cache(tmp_path) -> None:
    group = "sys/fs/cgroup/system.slice/ggufd.service"
    files = {
        "proc/self/cgroup": "0::/system.slice/ggufd.service\n",
        f"{group}/memory.max": f"{4 * GIB}\n",
        f"{group}/memory.current": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"anon {GIB}\nfile {2 * GIB + 1024}\nshmem 1024\n",
    }
    assert host_memory(machine(tmp_path, files)) == MemoryInfo(free=3 * GIB, total=4 * GIB)


def test_an_enclosing_cgroup_can_be_tighter(tmp_path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{3 * GIB}\n",
    }
    assert host_memory(machine(tmp_path, files)) == MemoryInfo(free=0, total=2 * GIB)


def test_cgroup_v1(tmp_path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n9:memory:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/x/memory.stat": f"total_cache {GIB // 2}\ntotal_shmem 0\n",
    }
    assert host_memory(machine(tmp_path, files)) == MemoryInfo(free=GIB // 2, total=GIB)


def test_this_machine_answers() -> None:
    info = host_memory()
    assert 0 < info.free <= info.total


def test_the_device_says_what_its_limit_leaves() -> None:
    device = HostDevice(memory_limit=1000, read_memory=lambda: MemoryInfo(free=10**9, total=10**9))
    device.allocate(400)
    assert device.memory_info() == MemoryInfo(free=600, total=1000)
    with pytest.raises(DeviceMemoryError, match="asked 601 bytes, 600 bytes free"):
        device.allocate(601)
    device.close()
