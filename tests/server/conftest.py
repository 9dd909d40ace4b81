"""A server over a scripted engine: real routes, real text room, real Unix socket.

Only the ids are made up.
"""

import asyncio
import dataclasses
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvloop
from aiohttp import web

from streamer.engine.handle import Handle
from streamer.engine.request import (
    EmbeddingEvent,
    EngineStatistics,
    FinishEvent,
    FinishReason,
    PrefillEvent,
    PromptEvent,
    Request,
    TokenEvent,
    TokenLogprobs,
)
from streamer.runtime.account import Snapshot
from streamer.server.app import make_runner
from streamer.server.metrics import Metrics
from streamer.server.sockets import bind_unix
from streamer.server.state import Backend, Limits, ModelCard, ServerState
from streamer.server.textwork import TextWork
from streamer.text.chat_template import ChatTemplates
from streamer.text.constraint import ConstraintFactory
from streamer.text.tokenizer import build_tokenizer

N_CTX = 64
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
END = 266  # <|im_end|>


def byte_characters() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    of = {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    return [of[b] for b in range(256)]


def metadata() -> dict[str, Any]:
    """Ids 0..255 are the bytes; <|im_end|> is 266."""
    words = [f"unused{i}" for i in range(8)]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_characters(), *words, *control, "<tool_call>", "</tool_call>"],
        "tokenizer.ggml.token_type": np.array([1] * 264 + [3] * 3 + [4] * 2, np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.fixture(scope="session")
def text() -> Iterator[TextWork]:
    tokenizer = build_tokenizer(metadata())
    templates = ChatTemplates(metadata(), tokenizer, deadline_s=5.0)
    work = TextWork(tokenizer, templates, ConstraintFactory(tokenizer, tokenizer.n_tokens))
    yield work
    work.close()


@pytest.fixture(scope="session")
def make_metadata() -> Callable[[], dict[str, Any]]:
    return metadata


Script = list["int | str | Exception"]


def ids_of(text: str) -> list[int | str | Exception]:
    return [*text.encode()]


@dataclass
class ScriptedEngine:
    """Plays `script(request)`: ids are sampled; "wait" holds until `gate` is set.

    An Exception fails the request. A request plays the script of the moment of its submission.
    """

    script: Callable[[Request], Script] = lambda request: ids_of("hello")
    refusal: Exception | None = None
    waiting: int = 0
    requests: list[Request] = field(default_factory=list)
    ended: list[FinishReason] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: dict[Handle, FinishReason] = field(default_factory=dict)
    plays: list["asyncio.Task[None]"] = field(default_factory=list)
    prefill: int = 0  # PrefillEvents before the prompt is done
    vector: tuple[float, ...] = (3.0, 4.0)

    def submit_nowait(self, request: Request) -> Handle:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        loop = asyncio.get_running_loop()
        handle = Handle(request, loop, self._ask, lambda: None, 64)
        self.plays.append(loop.create_task(self._play(handle, request, self.script)))
        return handle

    def _ask(self, handle: Handle, reason: FinishReason) -> None:
        self.asked[handle] = reason

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(waiting=self.waiting, running=len(self.requests) - len(self.ended))

    async def _play(self, handle: Handle, request: Request, script: Callable[[Request], Script]) -> None:
        for i in range(self.prefill):
            handle.deliver(PrefillEvent(i, self.prefill))
            await asyncio.sleep(0)
        handle.deliver(PromptEvent(0, _prompt_scores(request)))
        if request.embed:
            handle.deliver(EmbeddingEvent(self.vector))
            return self._finish(handle, FinishReason.STOP, 0)
        n = 0
        for item in script(request):
            if handle in self.asked:
                break
            if item == "wait":
                await self._held(handle)
            elif isinstance(item, Exception):
                return self._finish(handle, FinishReason.ERROR, n, str(item))
            elif n == request.max_tokens:
                return self._finish(handle, FinishReason.LENGTH, n)
            elif item in request.end_ids:
                return self._finish(handle, FinishReason.STOP, n + 1)
            else:
                n += 1
                handle.deliver(TokenEvent(int(item), _score(request, int(item))))
                await asyncio.sleep(0)
        self._finish(handle, self.asked.get(handle, FinishReason.LENGTH), n)
        return None

    async def _held(self, handle: Handle) -> None:
        while not self.gate.is_set() and handle not in self.asked:  # noqa: ASYNC110 - either ends it
            await asyncio.sleep(0.001)

    def _finish(self, handle: Handle, reason: FinishReason, n: int, error: str | None = None) -> None:
        n_prompt = len(handle.request.prompt_ids)
        self.ended.append(reason)
        handle.deliver(FinishEvent(reason, 1.0, 2.0, 3.0, 4.0, n_prompt, n, 0, 0, error))


def _score(request: Request, token_id: int) -> TokenLogprobs | None:
    n = request.sampling.n_logprobs
    return None if n is None else TokenLogprobs(-0.5, tuple((token_id + i, -0.5 - i) for i in range(n)))


def _prompt_scores(request: Request) -> tuple[TokenLogprobs | None, ...]:
    if not request.prompt_logprobs:
        return ()
    return (None, *(_score(request, i) for i in request.prompt_ids[1:]))


@dataclass
class Answered:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Data of the SSE events, JSON decoded; "[DONE]" as it is."""
        lines = [x[6:] for x in self.body.decode().splitlines() if x.startswith("data: ")]
        return [x if x == "[DONE]" else json.loads(x) for x in lines]


@dataclass
class Server:
    """A running server and its parts."""

    path: str
    state: ServerState
    engine: ScriptedEngine
    session: aiohttp.ClientSession
    backend: Backend
    n_connections: Callable[[], int]
    tcp: tuple[str, int] | None = None

    async def get(self, route: str, **options: Any) -> Answered:
        return await self._ask("GET", route, **options)

    async def post(self, route: str, body: Any, **options: Any) -> Answered:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._ask("POST", route, data=data, **options)

    async def _ask(self, method: str, route: str, **options: Any) -> Answered:
        async with self.session.request(method, f"http://localhost{route}", **options) as response:
            return Answered(response.status, response.headers, await response.read())

    async def complete(self, **members: Any) -> Answered:
        return await self.post("/v1/completions", {"prompt": "Hi", **members})

    async def chat(self, content: str = "Hi", **members: Any) -> Answered:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, **members})

    async def raw(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Send bytes as they are; everything that comes back until the server closes."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(data)
        if half_close:
            writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that must happen; what every task waits for is told when it does not."""
        try:
            async with asyncio.timeout(20):
                while not condition():  # noqa: ASYNC110 - any condition
                    await asyncio.sleep(0.001)
        except TimeoutError:
            for task in asyncio.all_tasks():
                task.print_stack()
            print(self.engine.ended, self.engine.asked, file=sys.stderr)
            raise


def residency(with_layers: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"status": "ready", "device": "host", "transfer": "host", "fraction": 1.0}
    return {**found, "layers": []} if with_layers else found


@asynccontextmanager
async def running_server(path: Path, text: TextWork, *, tcp: bool, **changes: Any) -> AsyncIterator[Server]:
    card = ModelCard("m", "/m.gguf", 1, "llama", N_CTX, 128, 1000, text.tokenizer.n_tokens, 2, 4000, "F32")
    engine = ScriptedEngine()
    backend = Backend(engine, text, card)
    metrics = Metrics(Snapshot, lambda: (0, 0))
    state = ServerState(residency=residency, metrics=metrics, model_id="m", backend=backend, status="ready")
    for name, value in changes.items():
        setattr(state, name, value)
    runner = make_runner(state, shutdown_timeout_s=0.1)
    await runner.setup()
    bound = bind_unix(str(path))
    await web.SockSite(runner, bound.socket).start()
    address = None
    if tcp:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        await web.SockSite(runner, listener).start()
    connector = aiohttp.UnixConnector(str(path))
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Server(str(path), state, engine, session, backend, lambda: runner.n_connections, address)
    finally:
        for play in engine.plays:
            play.cancel()
        await asyncio.gather(*engine.plays, return_exceptions=True)
        await runner.cleanup()
        bound.close()


Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path, text: TextWork) -> Run:
    """`run(body, **state)`: serve (with another `text`, if given), await `body(server)`, and see that nothing
    is left running.
    """

    def go(
        body: Callable[[Server], Awaitable[None]], *, tcp: bool = False, text: TextWork = text, **changes: Any
    ) -> None:
        async def main() -> None:
            before = asyncio.all_tasks()
            async with running_server(tmp_path / "s", text, tcp=tcp, **changes) as server:
                await body(server)
            left = asyncio.all_tasks() - before
            for _ in range(100):
                if not left:
                    break
                await asyncio.sleep(0.01)
                left = {t for t in left if not t.done()}
            assert not left

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    return go


@pytest.fixture
def roomy(run):
    def go(body):
        async def main(server):
            card = dataclasses.replace(server.backend.card, n_ctx=4096)
            server.state.backend = dataclasses.replace(server.backend, card=card)
            await body(server)

        run(main)

    return go


@pytest.fixture
def limits() -> type[Limits]:
    return Limits
