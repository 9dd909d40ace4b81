"""The account every backend keeps: live and peak bytes, and what went through the one door. Thread-safe."""

import threading

from streamer.device.base import CopyKind, CopyPhase, DeviceStatistics


class Account:
    """Counts for one device. `statistics()` is the only way out; numbers are bytes except `live_streams`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase = CopyPhase.LOAD
        self._allocated = self._peak_allocated = 0
        self._pinned = self._peak_pinned = 0
        self._streams = 0
        self._uploaded = {(phase, kind): 0 for phase in CopyPhase for kind in CopyKind}

    def allocated(self, nbytes: int) -> None:
        """Device bytes taken; negative when freed."""
        with self._lock:
            self._allocated += nbytes
            self._peak_allocated = max(self._peak_allocated, self._allocated)

    def pinned(self, nbytes: int) -> None:
        """Page-locked or registered host bytes taken; negative when released."""
        with self._lock:
            self._pinned += nbytes
            self._peak_pinned = max(self._peak_pinned, self._pinned)

    def streams(self, count: int) -> None:
        with self._lock:
            self._streams += count

    def uploaded(self, kind: CopyKind, nbytes: int) -> None:
        """Host-to-device bytes submitted; called by the backend's `upload` and by nothing else."""
        with self._lock:
            self._uploaded[self._phase, kind] += nbytes

    def enter_serving(self) -> None:
        with self._lock:
            assert self._phase is CopyPhase.LOAD, "serving is entered once"
            self._phase = CopyPhase.SERVE

    def enter_loading(self) -> None:
        with self._lock:
            self._phase = CopyPhase.LOAD
            self._uploaded = dict.fromkeys(self._uploaded, 0)

    def statistics(self) -> DeviceStatistics:
        with self._lock:
            return DeviceStatistics(
                allocated_bytes=self._allocated,
                peak_allocated_bytes=self._peak_allocated,
                pinned_bytes=self._pinned,
                peak_pinned_bytes=self._peak_pinned,
                uploaded_bytes=dict(self._uploaded),
                live_streams=self._streams,
            )

    def __repr__(self) -> str:
        return f"Account({self.statistics()})"
