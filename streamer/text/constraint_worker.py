"""Processes that compile one grammar each and compute its masks: llguidance under limits of work and memory.

The first process only builds the tokenizer and forks: for every connection it is handed, one process that
shares the tokenizer's memory, so that a constraint costs a fork and 2 MB and can harm no other. That one is
sent a grammar and after how much work to say that it is costly, then token ids; every answer is a status byte
and a body. It ends as soon as its owner hangs up, whatever it is doing.
"""

import gc
import os
import resource
import select
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import llguidance

from streamer.text.encoder import CONTROL, UNKNOWN, Encoder, EncoderSpec, bytes_of_token
from streamer.text.encoder_process import read_payload

# Go on; only an end may follow; error text; no process is to be had; the answer will take longer.
MASK, FINISHED, REFUSED, BUSY, COSTLY = range(5)
_MEMORY_NBYTES = 2 << 30  # of one constraint, beyond what it shares
# For a schema of 700 properties or a grammar of 2,900 alternatives; a step then takes up to 0.1 s.
_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    step_max_items=200_000,
    max_items_in_row=3_000,
    verbose_errors=False,
)
_COSTLY_NICE = 5  # a third of the share of what is not costly, where all want the processor
_N_TRIED = 64  # steps, of some 20 us each


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, spec: EncoderSpec, end_ids: Sequence[int]) -> None:
        self._encoder = Encoder(spec)
        spm = spec.kind == "spm"
        self.tokens = [bytes_of_token(spm, t, k) for t, k in zip(spec.tokens, spec.types, strict=True)]
        self.special_token_ids = [i for i, k in enumerate(spec.types) if k in (CONTROL, UNKNOWN)]
        if not end_ids:  # a token that no model has stands for the end
            end_ids = [len(self.tokens)]
            self.tokens.append(b"<|end|>")
            self.special_token_ids.append(end_ids[0])
        self.end_ids = list(end_ids)
        self.eos_token_id = self.end_ids[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode()
        return self._encoder.encode([(text, False)]).tolist()


class _Compiler:
    """llguidance's tokenizer and what is worth knowing of the vocabulary."""

    def __init__(self, spec: EncoderSpec, end_ids: Sequence[int]) -> None:
        vocabulary = _Vocabulary(spec, end_ids)
        wrapped = llguidance.TokenizerWrapper(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=vocabulary.end_ids)
        self._n_tokens = len(spec.tokens)
        special = {*vocabulary.special_token_ids, *vocabulary.end_ids}
        of_byte = {t: i for i, t in enumerate(vocabulary.tokens) if len(t) == 1 and i not in special}
        plain = [of_byte[t] for t in (bytes([b]) for b in range(0x21, 0x7F)) if t in of_byte]
        quote = [of_byte[b'"']] if b'"' in of_byte else []
        self._ways = (plain, quote + plain)  # into strings and on in them; out of them as soon as possible

    def compile(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at its beginning; in error when the grammar is wrong or its first steps are too much."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            return matcher
        return next((m for m in map(partial(_tried, matcher), self._ways) if m.is_error()), matcher)

    def state(self, matcher: llguidance.LLMatcher) -> bytes:
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if not matcher.is_error():
                return bytes([FINISHED if matcher.is_stopped() else MASK]) + self._clipped(mask)
        return bytes([REFUSED]) + str(matcher.get_error()).splitlines()[0][:300].encode()

    def _clipped(self, mask: bytes) -> bytes:
        """Only the vocabulary's own bits, in whole bytes."""
        whole, rest = divmod(self._n_tokens, 8)
        return mask[:whole] + bytes([mask[whole] & (1 << rest) - 1] if rest else [])


def _tried(matcher: llguidance.LLMatcher, way: Sequence[int]) -> llguidance.LLMatcher:
    """A copy after its first steps, each the first of `way` that is allowed. Most grammars that reach a limit
    reach it there, and the client learns it before anything is generated.
    """
    tried = matcher.deep_copy()
    for _ in range(_N_TRIED):
        mask = tried.compute_bitmask()
        chosen = next((i for i in way if mask[i // 8] >> i % 8 & 1), _lowest(mask))
        if chosen < 0 or tried.is_stopped() or tried.is_error():
            break
        tried.consume_token(chosen)
    return tried


def _lowest(mask: bytes) -> int:
    """The first id a mask allows; -1 when there is none."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def main(payload_fd: int, fds: Sequence[int], *end_ids: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    control = Connection(fds[0])
    compiler = _Compiler(read_payload(payload_fd), end_ids)
    gc.collect()
    gc.freeze()  # a collection would write to what is shared
    control.send_bytes(b"ready")
    while True:
        fd = recv_handle(control)
        try:
            if os.fork() == 0:
                control.close()
                _host(compiler, fd)
        except OSError:  # the limit of processes
            with suppress(OSError), Connection(os.dup(fd)) as owner:
                owner.send_bytes(bytes([BUSY]))
        os.close(fd)


def _host(compiler: _Compiler, fd: int) -> None:
    """A forked process's whole life: one constraint."""
    try:
        _limit_memory()
        owner = Connection(fd)
        grammar, quick_s = owner.recv()
        watch = _Watch(owner, quick_s)
        matcher = compiler.compile(grammar)
        watch.compiled()
        while True:
            owner.send_bytes(compiler.state(matcher))
            matcher.consume_token(int.from_bytes(owner.recv_bytes(), "little"))
    except (EOFError, OSError, MemoryError):
        pass
    except BaseException:  # noqa: BLE001 - the library's panics are no Exception
        traceback.print_exc()
    finally:
        os._exit(0)


class _Watch:
    """A thread that ends the process with its owner and tells the owner of a costly compile.

    It runs while llguidance computes.
    """

    def __init__(self, owner: Connection, quick_s: float) -> None:
        self._owner, self._quick_s = owner, quick_s
        self._lock = threading.Lock()
        self._compiling = True
        threading.Thread(target=self._run, daemon=True).start()

    def compiled(self) -> None:
        """Only answers are sent from here on."""
        with self._lock:
            self._compiling = False

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._owner, select.POLLRDHUP)
        while self._compiling and not poll.poll(1000 * self._quick_s):
            with self._lock:
                if self._compiling and time.process_time() > self._quick_s:
                    with suppress(OSError):  # it has just left
                        self._owner.send_bytes(bytes([COSTLY]))
                        os.setpriority(os.PRIO_PROCESS, os.getpid(), _COSTLY_NICE)
                    break
        poll.poll()
        os._exit(0)


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        shared = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (shared + _MEMORY_NBYTES,) * 2)
