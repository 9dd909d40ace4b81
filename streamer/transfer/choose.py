"""Which strategy a device gets: a table over its capabilities, and the refusals."""

from collections.abc import Callable
from dataclasses import dataclass

from streamer.device.base import Capabilities, Device
from streamer.errors import ConfigError
from streamer.transfer.base import MIB, Transfer
from streamer.transfer.crewed_ring import CrewedRing
from streamer.transfer.pinned_ring import PinnedRing
from streamer.transfer.registered_window import RegisteredWindow
from streamer.transfer.touch_copy import TouchCopy

STRATEGIES = ("ring", "window", "touch")
FILLERS = ("auto", "threads", "processes")
MANY_CORES = 6  # from here on processes fill the ring: so many threads would meet at the interpreter lock
MOST_PROCESSES = 12
CREWED_RING_NBYTES = 128 * MIB
FEW_CORES = 2  # two fill threads reach 15 GB/s, windows 19-23 GB/s with one


@dataclass(frozen=True)
class Row:
    """The first row whose predicate holds decides."""

    name: str
    applies: Callable[[Capabilities, int], bool]  # (capabilities, usable CPU cores)
    strategy: str
    why: str


ROWS = (
    Row("host", lambda c, _: c.kind == "host", "ring", "the same pipeline as on a GPU"),
    Row("integrated", lambda c, _: c.integrated, "touch", "one memory: faults inside the driver are ruinous"),
    Row(
        "coherent", lambda c, _: c.pageable_uses_host_page_tables, "touch", "shared page tables: touch first"
    ),
    Row("hmm", lambda c, _: c.pageable_memory_access, "ring", "reading host pages in place is fatal: copy"),
    Row(
        "few cores",
        lambda c, cores: c.host_register and c.read_only_host_register and cores <= FEW_CORES,
        "window",
        "DMA from the mapping needs no copy by the CPU",
    ),
    Row("discrete", lambda c, _: True, "ring", "pinned slots reach the link's rate"),
)


@dataclass(frozen=True)
class TransferOptions:
    """What the configuration says. None: chosen from the machine."""

    asked: str = "auto"  # "auto" | "ring" | "window" | "touch"
    ring_nbytes: int | None = None  # all slots together
    workers: int | None = None
    chunk_nbytes: int = 4 * MIB  # below it driver calls cost, above it slots leave the L3 cache (measured)
    streams: int | None = None
    keep_registered: bool = False
    fill: str = "auto"  # who fills the ring: "auto" | "threads" | "processes"
    verify: bool = False  # checksums of what passes are to be taken: whoever fills the ring does that


def row_for(capabilities: Capabilities, cores: int) -> Row:
    return next(row for row in ROWS if row.applies(capabilities, cores))


def choose(capabilities: Capabilities, asked: str, *, cores: int) -> str:
    """The strategy's name. ConfigError for an unknown one, or where the device cannot register windows."""
    if asked == "auto":
        return row_for(capabilities, cores).strategy
    if asked not in STRATEGIES:
        raise ConfigError(f"transfer: {asked!r} is none of auto, {', '.join(STRATEGIES)}")
    if asked == "window" and not (capabilities.host_register and capabilities.read_only_host_register):
        raise ConfigError(f"transfer: {capabilities.name} cannot register read-only memory; use ring")
    return asked


def worker_count(capabilities: Capabilities, cores: int) -> int:
    """Fill threads: 12-14 saturate a gen5 link (measured); two cores stay for the loop and the driver."""
    if capabilities.kind == "host":
        return max(1, min(4, cores))
    return max(2, min(14, cores - 2))


def filled_by_processes(capabilities: Capabilities, options: TransferOptions, cores: int) -> bool:
    """Whether processes fill the ring. They pay where a GPU takes bytes faster than threads stage them."""
    if options.fill != "auto":
        return options.fill == "processes"
    return capabilities.kind == "cuda" and cores >= MANY_CORES


def process_count(cores: int) -> int:
    """Staging processes: a dozen saturate a gen5 link; two cores stay for the conductor and the rest."""
    return max(2, min(MOST_PROCESSES, cores - 2))


def open_transfer(device: Device, options: TransferOptions, *, cores: int) -> Transfer:
    """Build the chosen strategy; pins nothing yet. ConfigError as in `choose`, or for an empty ring."""
    capabilities = device.capabilities
    name = choose(capabilities, options.asked, cores=cores)
    if name == "window":
        return RegisteredWindow(device, chunk_nbytes=options.chunk_nbytes, keep=options.keep_registered)
    if name == "ring" and filled_by_processes(capabilities, options, cores):
        return _crewed_ring(device, options, cores)
    workers = options.workers or worker_count(capabilities, cores)
    slots = 2 * workers
    if options.ring_nbytes is not None:
        slots = _slots_within(options.ring_nbytes, options.chunk_nbytes)
        workers = min(workers, slots)
    streams = options.streams or (1 if capabilities.kind == "host" else 2)
    strategy = PinnedRing if name == "ring" else TouchCopy
    return strategy(
        device,
        workers=workers,
        chunk_nbytes=options.chunk_nbytes,
        slots_per_worker=slots // workers,
        streams=streams,
    )


def _crewed_ring(device: Device, options: TransferOptions, cores: int) -> CrewedRing:
    ring_nbytes = options.ring_nbytes or CREWED_RING_NBYTES
    _slots_within(ring_nbytes, options.chunk_nbytes)
    return CrewedRing(
        device,
        processes=options.workers or process_count(cores),
        chunk_nbytes=options.chunk_nbytes,
        ring_nbytes=ring_nbytes,
        proves=options.verify,
    )


def _slots_within(ring_nbytes: int, chunk_nbytes: int) -> int:
    """Slots in a ring of so many bytes. ConfigError when not even one fits."""
    slots = ring_nbytes // chunk_nbytes
    if not slots:
        raise ConfigError(f"transfer: a ring of {ring_nbytes} bytes holds no slot of {chunk_nbytes}")
    return slots
