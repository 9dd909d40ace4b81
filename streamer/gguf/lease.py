"""A read lease on an open file: whoever wants to write or truncate it waits for copies in progress.

Linux breaks a lease by making the writer wait (/proc/sys/fs/lease-break-time, 45 s) and telling the holder.
That turns the one thing a mapping cannot survive, a page cut off in the middle of a memcpy, into an order of
events.
"""

import fcntl
import signal
import threading


class ReadLease:
    """Lease on `descriptor`, which stays the caller's. Methods may be called from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._held = False
        self._wanted_back = False
        self._copies = 0

    def acquire(self) -> bool:
        """False where there are no leases, the file is another user's, or someone may write it now."""
        try:
            # the notice is polled for; SIGURG is ignored by default, the usual SIGIO would end the process
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return False
        with self._lock:
            self._held, self._wanted_back = True, False
        return True

    def begin_copy(self) -> bool:
        """Whether a copy from the mapping is safe until `end_copy`, which must follow exactly when it is."""
        with self._lock:
            if not self._held or self._wanted_back:
                return False
            if fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                self._wanted_back = True
                self._give_back_when_idle()
                return False
            self._copies += 1
            return True

    def end_copy(self) -> None:
        with self._lock:
            self._copies -= 1
            if self._wanted_back:
                self._give_back_when_idle()

    def release(self) -> None:
        """Give the lease back as soon as no copy runs. Idempotent."""
        with self._lock:
            if self._held:
                self._wanted_back = True
                self._give_back_when_idle()

    def _give_back_when_idle(self) -> None:
        if not self._copies:
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            self._held = False
