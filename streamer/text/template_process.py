"""The owner's side of the template process: one at a time, a deadline each, started again when killed."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamer.errors import ClientError, GgufdError
from streamer.text.worker import Worker

log = logging.getLogger(__name__)

_START_DEADLINE_S = 20.0


class TemplateProcess:
    """Renders named templates in another process. Renderings take turns; a killed process costs only its own.

    Owned by one event loop; the waiting is done by one thread.
    """

    def __init__(self, sources: Mapping[str, str], *, deadline_s: float = 5.0) -> None:
        self._sources, self._deadline_s = dict(sources), deadline_s
        self._worker: Worker | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="templates")

    async def start(self) -> None:
        """Starts the process and compiles the templates, so that the first chat need not wait for it.

        A template that cannot be compiled is no error here: rendering it is.
        """
        for name in self._sources:
            try:
                await self.render(name, [])
            except ClientError as error:
                log.warning("event=chat_template_broken name=%s reason=%r", name, str(error))

    async def render(self, name: str, sets: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """One answer of `Renderer.answer` for each set of variables. ClientError 400 past the deadline."""
        answers: list[dict[str, str]] = await self._in_thread(self._render, name, list(sets))
        return answers

    def close(self) -> None:
        """Ends the process; what it was rendering is given up. Idempotent."""
        if self._worker is not None:
            self._worker.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _started(self) -> Worker:
        if self._worker is None or not self._worker.is_alive:
            worker = self._worker = Worker("streamer.text.template_worker")
            worker.channels[0].send(self._sources)
            if not worker.channels[0].poll(_START_DEADLINE_S) or worker.channels[0].recv_bytes() != b"ready":
                self._drop()
                raise GgufdError("the template process does not start")
        return self._worker

    def _render(self, name: str, sets: list[Mapping[str, Any]]) -> list[dict[str, str]]:
        try:
            channel = self._started().channels[0]
            channel.send((name, sets))
            if not channel.poll(self._deadline_s):
                self._drop()
                raise ClientError(
                    400, f"the model's chat template did not finish within {self._deadline_s:g} s"
                )
            answers: list[dict[str, str]] = json.loads(channel.recv_bytes())
        except (EOFError, OSError) as error:
            self._drop()
            raise ClientError(400, "the model's chat template ended its process") from error
        return answers

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = None
