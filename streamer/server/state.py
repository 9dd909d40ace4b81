"""What the routes know: limits, the residency account, and once ready the backend.

The service fills it in.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamer.config import Config
from streamer.engine.request import EngineStatistics
from streamer.errors import ClientError
from streamer.server.access import KeyRing
from streamer.server.api.errors import loading_error
from streamer.server.connection import ConnectionRules
from streamer.server.metrics import Metrics
from streamer.server.sequences import SubmittingEngine
from streamer.server.textwork import TextWork


@dataclass(frozen=True)
class Limits:
    """Numbers of the configuration that requests meet. A reload replaces the whole value."""

    body_nbytes: int = 16 << 20
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keepalive_s: float = 10.0
    queue_timeout_s: float = 300.0
    request_timeout_s: float | None = None
    max_queue: int = 256
    log_prompts: bool = False

    @classmethod
    def of(cls, config: Config) -> "Limits":
        return cls(
            body_nbytes=config.max_body_mib << 20,
            body_timeout_s=config.body_timeout,
            write_timeout_s=config.write_timeout,
            keepalive_s=config.keepalive_interval,
            queue_timeout_s=config.queue_timeout,
            request_timeout_s=config.request_timeout or None,
            max_queue=config.max_queue,
            log_prompts=config.log_prompts,
        )


@dataclass(frozen=True)
class ModelCard:
    """What /v1/models and /props say about the model."""

    id: str
    root: str  # its path, as given
    created: int
    architecture: str
    n_ctx: int
    n_ctx_train: int
    n_params: int
    n_vocab: int
    n_embd: int
    size: int
    ftype: str
    vocab_type: int = 2
    max_sequences: int = 1


class ServingEngine(SubmittingEngine, Protocol):
    def statistics(self) -> EngineStatistics: ...


@dataclass(frozen=True)
class Backend:
    """All that inference needs; there once the model is resident and warm."""

    engine: ServingEngine
    text: TextWork
    card: ModelCard


@dataclass
class ServerState:
    """Owned by the loop's thread."""

    residency: Callable[[bool], dict[str, Any]]  # the residency object, with its layers if True
    metrics: Metrics
    model_id: str
    limits: Limits = field(default_factory=Limits)
    rules: ConnectionRules = field(default_factory=ConnectionRules)
    keys: KeyRing = field(default_factory=KeyRing)
    hosts: frozenset[str] = frozenset()
    backend: Backend | None = None
    status: str = "loading"  # loading | ready | draining | failed
    running: int = 0  # inference requests being answered
    _idle: "asyncio.Future[None] | None" = None

    async def wait_idle(self) -> None:
        """Return once no inference request is being answered."""
        while self.running:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    def leave(self) -> None:
        """One request has been answered."""
        self.running -= 1
        if not self.running and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def ready_backend(self) -> Backend:
        """The backend, or the 503 that says why there is none."""
        if self.status == "ready" and self.backend is not None:
            return self.backend
        if self.status == "draining":
            raise ClientError(503, "the server is stopping", retry_after_s=5)
        if self.status == "failed":
            raise ClientError(503, "the model or its device failed", retry_after_s=5)
        raise loading_error()
