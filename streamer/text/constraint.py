"""Constrained answers behind `engine.request.Constraint`: compiled and computed in another process.

A mask is asked for as soon as the token before it is known, so it is computed while the device works.
"""

import collections
import os
import threading

from streamer.errors import ClientError, GgufdError
from streamer.text.constraint_worker import FINISHED, REFUSED
from streamer.text.encoder_process import payload
from streamer.text.tokenizer import Tokenizer, encoder_spec
from streamer.text.worker import Worker

_COMPILE_DEADLINE_S = 10.0
_MASK_DEADLINE_S = 30.0
_COMPILING, _ACCEPTING = 0, 1


class ConstraintFactory:
    """Compiles grammars (grammars.py) for one model. Thread-safe. Owns the process, started on first use.

    `n_vocab`: rows of the logits; ids beyond the vocabulary are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer, self.n_vocab = tokenizer, n_vocab
        self.mask_nbytes = (n_vocab + 31) // 32 * 4
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._next = 0
        self._dropped: collections.deque[tuple[_Process, int]] = collections.deque()

    def start(self) -> None:
        """Blocks until the process can compile: half a second to two. Optional; worth it before readiness."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """Ends the process; live constraints fail from then on. Idempotent."""
        with self._lock:
            if self._process is not None:
                self._process.close()
            self._process = None

    def compile(self, grammar: str) -> "HostedConstraint":
        """A constraint at its beginning. Blocks for milliseconds: call it from a thread.

        ClientError 400 when the grammar is wrong, cannot be enforced whole, or is too big to compile.
        """
        with self._lock:
            process = self._running()
            self._next += 1
            number = self._next
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            try:
                state = process.compile(number, grammar, [n for p, n in dropped if p is process])
            except (EOFError, OSError) as error:
                process.close()
                self._process = None
                raise ClientError(400, "the grammar takes too long or too much memory") from error
        if state.status == REFUSED:
            raise ClientError(400, f"the grammar cannot be used: {state.body.decode(errors='replace')}")
        return HostedConstraint(self, process, number, state)

    def drop(self, process: "_Process", number: int) -> None:
        """Called when a constraint is gone, from any thread, even amid a call: only notes it."""
        self._dropped.append((process, number))

    def _running(self) -> "_Process":
        if self._process is None or not self._process.is_alive:
            self._process = _Process(self._tokenizer)
        return self._process


class HostedConstraint:
    """One request's constraint. `accept` asks for the next mask; `mask` waits for it."""

    def __init__(self, factory: ConstraintFactory, process: "_Process", number: int, state: "_State") -> None:
        self._factory, self._process, self._number = factory, process, number
        self._state: _State | None = state

    def __del__(self) -> None:
        self._factory.drop(self._process, self._number)

    def mask(self) -> bytes:
        """Packed little-endian uint32 bits over `n_vocab`: end ids only where the answer may end."""
        return self._current().body.ljust(self._factory.mask_nbytes, b"\0")[: self._factory.mask_nbytes]

    def accept(self, token_id: int) -> None:
        self._current()
        self._state = None
        self._process.accept(self._number, token_id)

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._current().status == FINISHED

    def _current(self) -> "_State":
        if self._state is None:
            self._state = self._process.wait_state(self._number)
        if self._state.status == REFUSED:
            raise GgufdError(f"the constraint failed: {self._state.body.decode(errors='replace')}")
        return self._state


class _State:
    """An answer of the worker: number, status, mask or reason."""

    __slots__ = ("body", "number", "status")

    def __init__(self, answer: bytes) -> None:
        self.number, self.status, self.body = int.from_bytes(answer[:4], "little"), answer[4], answer[5:]


class _Process:
    """The worker and what it has answered but nobody has asked for yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        fd = payload(encoder_spec(tokenizer.vocabulary).blocks())
        try:
            ends = sorted(tokenizer.end_ids)
            self._worker = Worker("streamer.text.constraint_worker", n_channels=2, payload=fd, args=ends)
            channel = self._worker.channels[_COMPILING]
            if not channel.poll(60.0) or channel.recv_bytes() != b"ready":
                raise GgufdError("the constraint process does not start")
        except (EOFError, OSError) as error:
            raise GgufdError("the constraint process does not start") from error
        finally:
            os.close(fd)
        self._accepting = threading.Lock()
        self._waiting: dict[int, _State] = {}

    @property
    def is_alive(self) -> bool:
        return self._worker.is_alive

    def close(self) -> None:
        self._worker.kill()

    def compile(self, number: int, grammar: str, dropped: list[int]) -> _State:
        channel = self._worker.channels[_COMPILING]
        channel.send((number, grammar, dropped))
        if not channel.poll(_COMPILE_DEADLINE_S):
            raise EOFError
        return _State(channel.recv_bytes())

    def accept(self, number: int, token_id: int) -> None:
        with self._accepting:
            try:
                self._worker.channels[_ACCEPTING].send((number, token_id))
            except OSError as error:
                raise GgufdError("the constraint process ended") from error

    def wait_state(self, number: int) -> _State:
        """The state after the last `accept` of this constraint; others' that come first are kept for them."""
        channel = self._worker.channels[_ACCEPTING]
        with self._accepting:
            while number not in self._waiting:
                try:
                    if not channel.poll(_MASK_DEADLINE_S):
                        raise GgufdError("a mask took too long")
                    state = _State(channel.recv_bytes())
                except (EOFError, OSError) as error:
                    raise GgufdError("the constraint process ended") from error
                self._waiting[state.number] = state
            return self._waiting.pop(number)
