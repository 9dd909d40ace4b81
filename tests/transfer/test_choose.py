"""Which strategy a device gets: one test a row, and the refusals."""

from dataclasses import replace

import pytest

from streamer.device.base import Capabilities
from streamer.device.host import HostDevice
from streamer.errors import ConfigError
from streamer.transfer.choose import (
    MANY_CORES,
    ROWS,
    TransferOptions,
    choose,
    filled_by_processes,
    open_transfer,
    process_count,
    row_for,
    worker_count,
)
from streamer.transfer.crewed_ring import CrewedRing

DISCRETE = Capabilities(
    kind="cuda", name="discrete", host_register=True, read_only_host_register=True, copy_engines=3
)
MACHINES = {
    "host": (
        Capabilities(kind="host", name="host", host_register=True, read_only_host_register=True),
        2,
        "ring",
    ),
    "integrated": (replace(DISCRETE, integrated=True, pageable_memory_access=True), 20, "touch"),
    "coherent": (
        replace(DISCRETE, pageable_memory_access=True, pageable_uses_host_page_tables=True),
        72,
        "touch",
    ),
    "hmm": (replace(DISCRETE, pageable_memory_access=True), 16, "ring"),
    "few cores": (DISCRETE, 2, "window"),
    "discrete": (DISCRETE, 16, "ring"),
}


@pytest.mark.parametrize("row", [row.name for row in ROWS])
def test_each_row_decides_for_its_machine(row: str) -> None:
    capabilities, cores, strategy = MACHINES[row]
    assert row_for(capabilities, cores).name == row
    assert choose(capabilities, "auto", cores=cores) == strategy


def test_few_cores_without_read_only_registration_get_the_ring() -> None:
    assert choose(replace(DISCRETE, read_only_host_register=False), "auto", cores=2) == "ring"


@pytest.mark.parametrize("asked", ["ring", "window", "touch"])
@pytest.mark.parametrize("row", MACHINES)
def test_the_gate_can_be_forced(row: str, asked: str) -> None:
    capabilities, cores, _ = MACHINES[row]
    assert choose(capabilities, asked, cores=cores) == asked


@pytest.mark.parametrize("lacking", ["host_register", "read_only_host_register"])
def test_windows_are_refused_where_they_cannot_be_registered(lacking: str) -> None:
    with pytest.raises(ConfigError, match="cannot register read-only memory") as caught:
        choose(replace(DISCRETE, **{lacking: False}), "window", cores=16)
    assert caught.value.exit_code == 78


def test_an_unknown_strategy_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="auto, ring, window, touch"):
        choose(DISCRETE, "teleport", cores=16)


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 2), (4, 2), (8, 6), (16, 14), (64, 14)])
def test_fill_threads_follow_the_cores(cores: int, workers: int) -> None:
    assert worker_count(DISCRETE, cores) == workers


def test_the_ring_is_cut_to_the_size_asked_for() -> None:
    device = HostDevice()
    transfer = open_transfer(
        device, TransferOptions(ring_nbytes=3 << 20, chunk_nbytes=1 << 20, workers=8), cores=16
    )
    transfer.prepare()
    assert transfer.statistics().slots == 3
    assert device.statistics().pinned_bytes <= 3 * ((1 << 20) + 4096)
    transfer.close()
    with pytest.raises(ConfigError, match="holds no slot"):
        open_transfer(device, TransferOptions(ring_nbytes=1000), cores=16)
    device.close()


def test_pinned_memory_stays_within_256_mib_on_a_large_machine() -> None:
    capabilities = replace(DISCRETE)
    workers = worker_count(capabilities, 128)
    assert 2 * workers * ((4 << 20) + 4096) <= 256 << 20


@pytest.mark.parametrize(
    ("capabilities", "cores", "options", "processes"),
    [
        (DISCRETE, 16, TransferOptions(), True),
        (DISCRETE, MANY_CORES, TransferOptions(), True),
        (DISCRETE, MANY_CORES - 1, TransferOptions(), False),
        (DISCRETE, 16, TransferOptions(verify=True), True),
        (DISCRETE, 16, TransferOptions(fill="threads"), False),
        (DISCRETE, 2, TransferOptions(fill="processes"), True),
        (HostDevice().capabilities, 16, TransferOptions(), False),
    ],
)
def test_who_fills_the_ring(capabilities, cores: int, options: TransferOptions, processes: bool) -> None:
    assert filled_by_processes(capabilities, options, cores) is processes


@pytest.mark.parametrize(("cores", "processes"), [(2, 2), (6, 4), (16, 12), (128, 12)])
def test_staging_processes_follow_the_cores(cores: int, processes: int) -> None:
    assert process_count(cores) == processes


def test_a_ring_filled_by_processes_has_the_size_asked_for() -> None:
    device = HostDevice()
    options = TransferOptions(
        asked="ring", fill="processes", workers=1, ring_nbytes=3 << 20, chunk_nbytes=1 << 20
    )
    transfer = open_transfer(device, options, cores=16)
    assert isinstance(transfer, CrewedRing)
    transfer.prepare()
    assert device.statistics().pinned_bytes == transfer.statistics().pinned_bytes == 3 << 20
    transfer.close()
    with pytest.raises(ConfigError, match="holds no slot"):
        open_transfer(device, replace(options, ring_nbytes=1000), cores=16)
    device.close()
