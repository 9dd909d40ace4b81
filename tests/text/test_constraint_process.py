"""The processes behind constraints: one each, harming nobody, gone when they are not needed."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamer.errors import ClientError, GgufdError
from streamer.server.api.calls import OutputFormat
from streamer.server.textwork import TextWork
from streamer.text import grammars
from streamer.text.chat_template import ChatTemplates
from streamer.text.constraint import ConstraintFactory, HostedConstraint
from streamer.text.tokenizer import Tokenizer

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


def allowed(constraint: HostedConstraint) -> set[int]:
    bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accepted_mask(constraint: HostedConstraint) -> bytes:
    constraint.accept(0)
    return constraint.mask()


def children(factory: ConstraintFactory) -> set[int]:
    assert factory._parent is not None
    pid = factory._parent.pid
    return {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def strict_factory(smollm2: Tokenizer) -> Iterator[ConstraintFactory]:
    """Its deadline is short, and one costly grammar at once is enough for it."""
    factory = ConstraintFactory(smollm2, smollm2.n_tokens, deadline_s=4.0, quick_s=0.1, n_costly=1)
    factory.start()
    yield factory
    factory.close()


def test_dropped_constraints_leave_no_process(strict_factory: ConstraintFactory) -> None:
    constraint = strict_factory.compile(grammars.json_object())
    assert len(children(strict_factory)) == 1
    del constraint
    gc.collect()
    until(lambda: not children(strict_factory))


def test_a_closed_constraint_leaves_no_process_and_nobody_waiting(
    strict_factory: ConstraintFactory, smollm2: Tokenizer
) -> None:
    constraint = strict_factory.compile(grammars.json_object())
    (pid,) = children(strict_factory)
    os.kill(pid, signal.SIGSTOP)  # its answer will not come
    constraint.accept(smollm2.encode("{", add_special=False)[0])
    failed: list[GgufdError] = []

    def wait() -> None:
        try:
            constraint.mask()
        except GgufdError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    constraint.close()
    waiting.join(5)
    assert len(failed) == 1
    os.kill(pid, signal.SIGCONT)
    until(lambda: not children(strict_factory))
    constraint.close()


def test_refused_grammars_leave_no_process(strict_factory: ConstraintFactory) -> None:
    with pytest.raises(ClientError):
        strict_factory.compile(grammars.json_schema({"type": "objekt"}))
    until(lambda: not children(strict_factory))


COSTLY = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}b*"} for i in range(60)]}


def test_costly_grammars_harm_nobody_else(strict_factory: ConstraintFactory, smollm2: Tokenizer) -> None:
    """Constraints that live go on and plain ones come at once, while of the costly ones one is refused at its
    deadline, those beyond it at once.
    """
    living = strict_factory.compile(grammars.json_schema(OBJECT))
    statuses: list[int] = []

    def costly() -> None:
        with pytest.raises(ClientError) as caught:
            strict_factory.compile(grammars.json_schema(COSTLY))
        statuses.append(caught.value.status)

    threads = [threading.Thread(target=costly) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert strict_factory.compile(grammars.json_object()).mask()
    for i in smollm2.encode('{"a": 1', add_special=False):
        assert i in allowed(living)
        living.accept(i)
    until(lambda: statuses == [429] * 3)
    assert strict_factory.compile(grammars.json_object()).mask()
    assert len(statuses) == 3  # the fourth is still being compiled
    for thread in threads:
        thread.join()
    assert statuses == [429, 429, 429, 400]
    assert smollm2.encode("}", add_special=False)[0] in allowed(living)
    until(lambda: len(children(strict_factory)) == 1)


class StuckFactory(ConstraintFactory):
    """Compiles nothing until it is told to go on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, tokenizer.n_tokens)
        self.go_on = threading.Event()

    def compile(self, grammar: str) -> HostedConstraint:
        self.go_on.wait(60)
        raise ClientError(400, "gone on")


def test_prompts_do_not_wait_for_grammars(bpe: Tokenizer, make_bpe: Any) -> None:
    factory = StuckFactory(bpe)
    templates = ChatTemplates(make_bpe(chat_template="x"), bpe, deadline_s=5.0)
    work = TextWork(bpe, templates, factory, threads=1)
    long = "hello " * 100

    async def main() -> None:
        stuck = [asyncio.ensure_future(work.constraint(OutputFormat(json_object=True))) for _ in range(4)]
        ids = await asyncio.wait_for(work.encode(long, add_special=False, parse_special=False), 20)
        assert bpe.decode(ids) == long
        factory.go_on.set()
        await asyncio.gather(*stuck, return_exceptions=True)

    try:
        asyncio.run(main())
    finally:
        factory.go_on.set()
        work.close()


def test_constraint_whose_process_dies_fails_alone(strict_factory: ConstraintFactory) -> None:
    first = strict_factory.compile(grammars.json_object())
    (pid,) = children(strict_factory)
    second = strict_factory.compile(grammars.json_object())
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in children(strict_factory))
    with pytest.raises(GgufdError):
        accepted_mask(first)
    second.accept(int(min(allowed(second))))
    assert second.mask()


def test_process_that_others_are_forked_from_is_started_again(strict_factory: ConstraintFactory) -> None:
    constraint = strict_factory.compile(grammars.json_object())
    assert strict_factory._parent is not None
    os.kill(strict_factory._parent.pid, signal.SIGKILL)
    strict_factory._parent._process.wait()
    assert strict_factory.compile(grammars.json_object()).mask()
    constraint.accept(int(min(allowed(constraint))))
    assert constraint.mask()


def test_vocabulary_without_end_tokens_can_be_constrained(bpe: Tokenizer, make_bpe: Any) -> None:
    from streamer.text.tokenizer import build_tokenizer

    tokens = list(make_bpe()["tokenizer.ggml.tokens"])
    tokens[264], tokens[266] = "x1", "x2"
    tokenizer = build_tokenizer(make_bpe(tokens=tokens, eos_token_id=None))
    assert tokenizer.end_ids == frozenset()
    factory = ConstraintFactory(tokenizer, 270)
    try:
        constraint = factory.compile(grammars.regex("a"))
        assert allowed(constraint) == {ord("a")}
        constraint.accept(ord("a"))
        assert constraint.is_finished
        assert allowed(constraint) == set()
    finally:
        factory.close()
