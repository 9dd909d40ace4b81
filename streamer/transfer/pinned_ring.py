"""The pinned ring: workers own slots, fill them and queue their copies. The default over a link."""

from streamer.device.base import Device
from streamer.transfer.base import Run, TransferStatistics
from streamer.transfer.slot_worker import SlotWorker
from streamer.transfer.slots import SlotPool

BATCH = 4  # chunks a worker takes at a time: one question, one touch for all of them


class PinnedRing:
    """Pins `workers` x `slots_per_worker` slots of `chunk_nbytes` and a page: all its host memory."""

    name = "ring"

    def __init__(
        self,
        device: Device,
        *,
        workers: int,
        chunk_nbytes: int,
        slots_per_worker: int = 2,
        streams: int = 1,
        batch: int = BATCH,
    ) -> None:
        self.n_workers, self.n_streams, self.chunk_nbytes = workers, min(streams, workers), chunk_nbytes
        self.batch = batch
        self._pool = SlotPool(device, workers=workers, per_worker=slots_per_worker, chunk_nbytes=chunk_nbytes)

    def prepare(self) -> None:
        self._pool.take_all()

    def work(self, worker: int, run: Run) -> None:
        slots = self._pool.take(worker)
        if slots:  # else no pinned memory is left for this worker: the others carry on
            SlotWorker(slots, worker, run).work()

    def detach(self) -> None:
        return None  # slots hold nothing of a source

    def close(self) -> None:
        self._pool.close()

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(self.name, self.n_workers, self._pool.count, self._pool.nbytes)

    def __repr__(self) -> str:
        return f"PinnedRing({self.statistics()})"
