"""The process that compiles grammars and computes masks: llguidance under limits of work and memory.

Two channels: on the first grammars are compiled and dropped, on the second tokens are accepted. Every answer
is the constraint's number, a status byte and a body.
"""

import resource
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

import llguidance

from streamer.text.encoder import CONTROL, UNKNOWN, Encoder, EncoderSpec, bytes_of_token
from streamer.text.encoder_process import read_payload

MASK, FINISHED, REFUSED = 0, 1, 2  # status: go on, only an end may follow, error text
_MEMORY_NBYTES = 8 << 30
_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, step_max_items=50_000, verbose_errors=False
)


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


class Compiler:
    """Constraints by number. `compile`, `accept` and `drop` are each called from one thread."""

    def __init__(self, spec: EncoderSpec, end_ids: Sequence[int]) -> None:
        vocabulary = _Vocabulary(spec, end_ids)
        wrapped = llguidance.TokenizerWrapper(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=vocabulary.end_ids)
        self._n_tokens = len(spec.tokens)
        self._matchers: dict[int, llguidance.LLMatcher] = {}

    def compile(self, number: int, grammar: str) -> bytes:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        answer = self._state(number, matcher)
        if answer[4] != REFUSED:
            self._matchers[number] = matcher
        return answer

    def accept(self, number: int, token_id: int) -> bytes:
        matcher = self._matchers.get(number)
        if matcher is None:
            return _answer(number, REFUSED, b"the constraint was dropped")
        matcher.consume_token(token_id)
        return self._state(number, matcher)

    def _clipped(self, mask: bytes) -> bytes:
        """Only the vocabulary's own bits, in whole bytes."""
        whole, rest = divmod(self._n_tokens, 8)
        return mask[:whole] + bytes([mask[whole] & (1 << rest) - 1] if rest else [])

    def drop(self, number: int) -> None:
        self._matchers.pop(number, None)

    def _state(self, number: int, matcher: llguidance.LLMatcher) -> bytes:
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if not matcher.is_error():
                return _answer(number, FINISHED if matcher.is_stopped() else MASK, self._clipped(mask))
        return _answer(number, REFUSED, str(matcher.get_error()).splitlines()[0][:300].encode())


def _answer(number: int, status: int, body: bytes) -> bytes:
    return number.to_bytes(4, "little") + bytes([status]) + body


def main(payload_fd: int, fds: Sequence[int], *end_ids: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_NBYTES, _MEMORY_NBYTES))
    compiling, accepting = (Connection(fd) for fd in fds)
    compiler = Compiler(read_payload(payload_fd), end_ids)
    compiling.send_bytes(b"ready")
    thread = threading.Thread(target=_compile_loop, args=(compiler, compiling))
    thread.start()
    try:
        while True:
            accepting.send_bytes(compiler.accept(*accepting.recv()))
    except (EOFError, OSError):
        thread.join()


def _compile_loop(compiler: Compiler, channel: Connection) -> None:
    try:
        while True:
            number, grammar, dropped = channel.recv()
            for old in dropped:
                compiler.drop(old)
            channel.send_bytes(compiler.compile(number, grammar))
    except (EOFError, OSError):
        return
