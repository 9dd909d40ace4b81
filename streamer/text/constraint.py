"""Constrained answers behind `engine.request.Constraint`: each compiled and computed in a process of its own.

A mask is asked for as soon as the token before it is known, so it is computed while the device works.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle

from streamer.errors import ClientError, GgufdError
from streamer.text.constraint_worker import BUSY, COSTLY, FINISHED, REFUSED
from streamer.text.encoder_process import payload
from streamer.text.tokenizer import Tokenizer, encoder_spec
from streamer.text.worker import Worker

_START_DEADLINE_S = 60.0
_MASK_DEADLINE_S = 10.0


class ConstraintFactory:
    """Compiles grammars (grammars.py) for one model. Thread-safe. Owns the process that the constraints' own
    are forked from, started on first use.

    `n_vocab`: rows of the logits; ids beyond the vocabulary are never allowed. What is not compiled after
    `quick_s` of processor time is costly: of those, `n_costly` at once may go on until `deadline_s` are over,
    the others are refused, so that any number of them takes no more of the machine.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        n_vocab: int,
        *,
        deadline_s: float = 10.0,
        quick_s: float = 0.5,
        n_costly: int = 2,
    ) -> None:
        self._tokenizer, self.n_vocab = tokenizer, n_vocab
        self.mask_nbytes = (n_vocab + 31) // 32 * 4
        self._deadline_s, self._quick_s = deadline_s, quick_s
        self._costly = threading.Semaphore(n_costly)
        self._lock = threading.Lock()
        self._parent: Worker | None = None

    def start(self) -> None:
        """Blocks until constraints can be compiled: a third of a second to three. Optional; worth it before
        readiness.
        """
        with self._lock:
            self._running()

    def close(self) -> None:
        """No more are compiled; those that live end with their requests. Idempotent."""
        with self._lock:
            if self._parent is not None:
                self._parent.close()
            self._parent = None

    def compile(self, grammar: str) -> "HostedConstraint":
        """A constraint at its beginning. Blocks, mostly for milliseconds: call it from a thread.

        ClientError: 400 when the grammar is wrong, cannot be enforced whole, or is too big to compile; 429
        when it is costly and enough others are, or when no process can be had.
        """
        channel = self._fork()
        try:
            channel.send((grammar, self._quick_s))
            deadline = time.monotonic() + self._deadline_s
            state = _received(channel, deadline)
            if state.status == COSTLY:
                state = self._finished_costly(channel, deadline)
            if state.status == REFUSED:
                raise ClientError(400, f"the grammar cannot be used: {state.reason}")
            if state.status == BUSY:
                raise _busy("too many constrained answers")
        except (EOFError, OSError) as error:
            channel.close()
            raise ClientError(400, "the grammar takes too long or too much memory") from error
        except BaseException:
            channel.close()  # ends the process
            raise
        return HostedConstraint(channel, state, self.mask_nbytes)

    def _finished_costly(self, channel: Connection, deadline: float) -> "_State":
        if not self._costly.acquire(blocking=False):
            raise _busy("other costly grammars are being compiled")
        try:
            return _received(channel, deadline)
        finally:
            self._costly.release()

    def _fork(self) -> Connection:
        ours, theirs = Pipe()
        with self._lock, theirs:
            try:
                send_handle(self._running().channels[0], theirs.fileno(), None)
            except OSError as error:
                ours.close()
                raise GgufdError("the constraint process ended") from error
        return ours

    def _running(self) -> Worker:
        if self._parent is None or not self._parent.is_alive:
            self._parent = _started(self._tokenizer)
        return self._parent


class HostedConstraint:
    """One request's constraint. `accept` asks for the next mask; `mask` waits for it. One call at a time.

    Its process ends when it is closed, or when nothing refers to it any more: the connection is gone.
    """

    def __init__(self, channel: Connection, state: "_State", mask_nbytes: int) -> None:
        self._channel, self._mask_nbytes = channel, mask_nbytes
        self._state: _State | None = state
        self._in_use = threading.Lock()  # the descriptor: nobody may wait on it once it is closed

    def close(self) -> None:
        """Also while another thread waits for a mask: that fails."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._channel.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)  # wakes who waits
        with self._in_use:
            self._channel.close()

    def mask(self) -> bytes:
        """Packed little-endian uint32 bits over `n_vocab`: end ids only where the answer may end."""
        return self._current().body.ljust(self._mask_nbytes, b"\0")[: self._mask_nbytes]

    def accept(self, token_id: int) -> None:
        self._current()
        self._state = None
        try:
            with self._in_use:
                self._channel.send_bytes(token_id.to_bytes(4, "little"))
        except OSError as error:
            raise GgufdError("the constraint process ended") from error

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._current().status == FINISHED

    def _current(self) -> "_State":
        if self._state is None:
            try:
                with self._in_use:
                    if not self._channel.poll(_MASK_DEADLINE_S):
                        raise GgufdError("a mask took too long")
                    self._state = _State(self._channel.recv_bytes())
            except (EOFError, OSError) as error:
                raise GgufdError("the constraint process ended") from error
        if self._state.status == REFUSED:
            raise GgufdError(f"the constraint failed: {self._state.reason}")
        return self._state


class _State:
    """An answer of the worker: status, mask or reason."""

    __slots__ = ("body", "status")

    def __init__(self, answer: bytes) -> None:
        self.status, self.body = answer[0], answer[1:]

    @property
    def reason(self) -> str:
        return self.body.decode(errors="replace")


def _started(tokenizer: Tokenizer) -> Worker:
    fd = payload(encoder_spec(tokenizer.vocabulary).blocks())
    try:
        ends = sorted(tokenizer.end_ids)
        worker = Worker("streamer.text.constraint_worker", payload=fd, args=ends)
        channel = worker.channels[0]
        if not channel.poll(_START_DEADLINE_S) or channel.recv_bytes() != b"ready":
            raise GgufdError("the constraint process does not start")
    except (EOFError, OSError) as error:
        raise GgufdError("the constraint process does not start") from error
    finally:
        os.close(fd)
    return worker


def _received(channel: Connection, deadline: float) -> _State:
    if not channel.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError
    return _State(channel.recv_bytes())


def _busy(reason: str) -> ClientError:
    return ClientError(429, reason, type="rate_limit_error", retry_after_s=1)
