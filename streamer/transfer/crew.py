"""A crew: processes that copy pieces of files into shared memory, so that no interpreter lock stands between.

Threads that copy 4 MiB at a time meet at the lock after every call; a dozen of them stage 20-39 GB/s on a
machine whose memory gives 60 (measured). A process here holds nothing that must be given back: it may be
killed at any moment, once nobody relies on what it was copying.
"""

import contextlib
import ctypes
import errno
import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import streamer
from streamer.transfer import crew_child
from streamer.transfer.base import Source
from streamer.transfer.crew_child import DONE, FILE, JOB, RECORDS

log = logging.getLogger("ggufd.transfer")

END_S = 1.0  # a killed process is gone sooner, unless storage holds it: then it goes when storage answers
_COLLECTED = 512  # records read at once

# Pipes that never make us wait are used with the interpreter lock held: to get it back may take a millisecond
# beside a thread that computes.
_quick = ctypes.PyDLL(None, use_errno=True)
_quick.read.argtypes = _quick.write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_quick.read.restype = _quick.write.restype = ctypes.c_ssize_t


def _module_path() -> str:
    """Where this process found its modules, for one that starts without them."""
    return os.pathsep.join([str(Path(streamer.__file__).parents[1]), *filter(None, sys.path)])


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


class Job(NamedTuple):
    """Copy `nbytes` at `offset` of a file (`file`: which of those introduced) to `target` in the ring."""

    token: int
    file: int
    way: int  # of crew_child
    offset: int
    nbytes: int
    target: int


class Done(NamedTuple):
    token: int
    process: int
    code: int  # errno, 0: copied
    begun_s: float  # by perf_counter, which all processes share
    touched_s: float
    ended_s: float
    checksum: int  # of the piece where the crew proves


class Crew:
    """`count` processes over `nbytes` of shared memory. Fewer, or none, with a warning, where they cannot be.

    One thread gives jobs and collects. Closed until started, and again after `close`. `proves`: every job's
    checksum comes back with it.
    """

    def __init__(self, count: int, *, proves: bool = False) -> None:
        self._count, self.proves = count, proves
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files: list[socket.socket] = []  # one a process: where it is handed descriptors
        self._introduced: list[Source] = []
        self._jobs = self._done = -1
        self._records = ctypes.create_string_buffer(DONE.size * _COLLECTED)

    @property
    def is_open(self) -> bool:
        return bool(self._processes)

    @property
    def is_whole(self) -> bool:
        """Every process still lives."""
        return all(process.poll() is None for process in self._processes)

    @property
    def count(self) -> int:
        return len(self._processes)

    def start(self, memory: int, nbytes: int) -> None:
        """Start the processes over the shared memory of descriptor `memory`. They come up by themselves."""
        jobs, self._jobs = os.pipe2(os.O_CLOEXEC)
        self._done, done = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._done, False)
        try:
            for number in range(self._count):
                self._spawn(number, jobs, done, memory, nbytes)
        except (OSError, ValueError) as error:
            log.warning("event=fewer_staging_processes started=%d error=%s", self.count, error)
        finally:
            os.close(jobs)
            os.close(done)
        if not self._processes:
            self.close()

    def introduce(self, sources: Sequence[Source]) -> int:
        """Hand the files to every process, once; the index of the first."""
        known = self._introduced
        for first in range(len(known) - len(sources) + 1):
            if all(a is b for a, b in zip(known[first:], sources, strict=False)):
                return first
        for source in sources:
            for files in self._files:
                with contextlib.suppress(OSError):  # it has ended: met when the jobs are not done
                    socket.send_fds(files, [FILE.pack(source.nbytes)], [source.descriptor])
        known += sources
        return len(known) - len(sources)

    def give(self, jobs: Iterable[Job]) -> None:
        """Queue jobs, in order. OSError when nobody is left to take them."""
        records = [JOB.pack(*job) for job in jobs]
        for first in range(0, len(records), RECORDS):
            part = b"".join(records[first : first + RECORDS])
            if _quick.write(self._jobs, part, len(part)) < 0:
                raise _error()

    def collect(self) -> list[Done]:
        """What has been done since. OSError when nobody is left."""
        count = _quick.read(self._done, self._records, len(self._records))
        if count < 0 and ctypes.get_errno() == errno.EAGAIN:
            return []
        if count <= 0:
            raise _error() if count else BrokenPipeError("the staging processes have ended")
        return [Done(*record) for record in DONE.iter_unpack(memoryview(self._records)[:count])]

    def wait(self, seconds: float) -> bool:
        """Until something is done, or the time is over (False)."""
        poller = select.poll()
        poller.register(self._done, select.POLLIN)
        return bool(poller.poll(seconds * 1e3))

    def close(self) -> bool:
        """Kill the processes and wait for their end; False if one is still inside a read. Idempotent."""
        are_gone = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                log.warning("event=staging_process_stays pid=%d", process.pid)
                are_gone = False
        for files in self._files:
            files.close()
        for descriptor in (self._jobs, self._done):
            if descriptor >= 0:
                os.close(descriptor)
        self._processes, self._files, self._introduced = [], [], []
        self._jobs = self._done = -1
        return are_gone

    def _spawn(self, number: int, jobs: int, done: int, memory: int, nbytes: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            inherited = (jobs, done, theirs.fileno(), memory)
            program = (sys.executable, "-I", "-S", str(Path(crew_child.__file__)))
            command = (*program, number, *inherited, nbytes, _module_path() if self.proves else "")
            try:
                process = subprocess.Popen(
                    [str(word) for word in command],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        self._processes.append(process)
        self._files.append(ours)

    def __repr__(self) -> str:
        return f"Crew({self.count} processes, {'open' if self.is_open else 'closed'})"
