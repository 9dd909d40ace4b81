"""The composition root: the only place where all rooms meet. `serve(config)` is the daemon; __main__ imports
it.

A life: socket and probes -> header -> plan -> upload -> verify -> warm -> READY -> drain -> free -> gone.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from streamer import __version__
from streamer.config import Config, changed_options, load_config, to_journal
from streamer.errors import GgufdError, readable
from streamer.gguf.directory import Directory
from streamer.models.registry import Architecture
from streamer.process import SIGNALS, check_trace, raise_descriptor_limit
from streamer.pull import model_path
from streamer.residency.ledger import Ledger
from streamer.residency.state import Phase
from streamer.runtime.account import Snapshot, residency_object, snapshot, status_line
from streamer.runtime.ground import Ground
from streamer.runtime.options import StartOptions
from streamer.runtime.planning import read_model
from streamer.runtime.start import Runtime, has_changed, start_runtime
from streamer.runtime.step_times import StepTimes
from streamer.server.access import allowed_hosts, read_keys
from streamer.server.app import make_runner
from streamer.server.card import make_card
from streamer.server.connection import ConnectionRules
from streamer.server.listening import Listening, open_listening
from streamer.server.logs import configure_logging, log_event
from streamer.server.metrics import Metrics
from streamer.server.rehearsal import rehearse
from streamer.server.sockets import BACKLOG
from streamer.server.state import Backend, Limits, ServerState
from streamer.server.textwork import TextWork, build_text, check_text
from streamer.systemd import Notifier, inherited_sockets, watchdog_interval_s

logger = logging.getLogger("ggufd")

REPORT_S = 0.25  # between STATUS lines while loading
EXTEND_S = 15.0  # without progress for this long, a start ends when the service manager's time is over
STOP_S = 1.8  # from SIGTERM during a load until the process is gone, whatever hangs
FREE_S = 10.0  # the same after a drain
SWITCH_S = 0.001  # a thread that wants the interpreter lock waits no longer; Python's 5 ms are a whole step
ECHO_S = 1.0  # a signal held before the loop ran may be told again by the loop: not a second one
FAREWELL_S = 1.0  # probes and error events say "failed" that long before a failed process goes


def serve(config: Config, early: list[int]) -> int:
    """Run the daemon until it is told to stop. Returns 0; refusals and failures are raised as GgufdError.

    `early` gets the signals that come before there is a loop (`hold_signals`).
    """
    configure_logging(
        style=config.log_format, level=config.log_level, journal=to_journal(), debug=config.debug
    )
    check_trace(config.trace)
    notifier = Notifier.from_environment()
    watchdog_s = watchdog_interval_s()
    listening = open_listening(config, [given.socket for given in inherited_sockets()])
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop, debug=config.debug) as runner:
            runner.run(Daemon(config, notifier, listening, watchdog_s).run(early))
    finally:
        listening.close()
        notifier.close()
    return 0


class Daemon:
    """Owned by the loop's thread. What ends it is put into `_ending`: a signal's number or an exception."""

    def __init__(
        self, config: Config, notifier: Notifier, listening: Listening, watchdog_s: float | None
    ) -> None:
        self._config, self._notifier, self._listening = config, notifier, listening
        self._watchdog_s = watchdog_s
        self._path = model_path(config.model)
        self._name = readable(self._path)
        self._ledger = Ledger(model=self._name)
        self._steps = StepTimes()
        self._runtime: Runtime | None = None
        self._text: asyncio.Task[TextWork] | None = None
        self._n_warmed = 0
        self._own_tokens = (0, 0)  # prompt and generated tokens of the rehearsal: nobody's requests
        self._state = ServerState(
            residency=self._residency,
            metrics=Metrics(self._snapshot, self._connections),
            model_id=config.alias or Path(self._name).stem,
            limits=Limits.of(config),
            rules=_rules(config),
            keys=read_keys(config.api_key_file),
            hosts=allowed_hosts(config.listen, config.allow_host),
        )
        self._http = make_runner(self._state, shutdown_timeout_s=0.5)

    async def run(self, early: list[int]) -> None:
        """`early`: signals that came before there was a loop."""
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[int | Exception] = self._loop.create_future()
        self._hangup = asyncio.Event()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._signalled, number)
        self._echo_until_s = self._loop.time() + ECHO_S if early else 0.0
        for held in early:
            self._signalled(held)
        try:
            await self._listen()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(t) for t in (self._report(), self._guarded(self._life))]
                cause = await self._ending
                alarm = self._announce_end(cause)
                await self._drain(cause)
                for task in tasks:
                    task.cancel()
        finally:
            await self._free()
        alarm.cancel()
        if isinstance(cause, Exception):
            raise cause
        log_event(logger, logging.INFO, "stopped")

    # ---- coming up -----------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        await self._http.setup()
        for listener in self._listening.sockets:
            await web.SockSite(self._http, listener, backlog=BACKLOG).start()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Whatever fails ends the daemon, in order."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - raised again by `run`, after everything is freed
            self._end(error)

    async def _life(self) -> None:
        await self._bring_up()
        self._notifier.ready(status_line(self._ledger.statistics()))
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            self._notifier.reloading()
            await self._reload()
            self._notifier.ready(status_line(self._ledger.statistics()))

    async def _bring_up(self, ground: Ground | None = None) -> None:
        """Everything from the header to READY, over what an earlier load of the file has left."""
        runtime = await start_runtime(
            StartOptions.of(self._config, self._path),
            self._ledger,
            ground=ground,
            on_directory=self._header_is_read,
            on_failure=self._engine_failed,
            on_step=self._steps.observe,
            advanced=self._warmed,
        )
        self._runtime = runtime
        assert self._text is not None
        text = await self._text
        model = runtime.model
        card = make_card(self._state.model_id, self._name, model.directory, model.architecture, model.plan)
        self._state.backend = Backend(runtime.engine, text, card)
        await rehearse(self._state.backend)
        counted = runtime.engine.statistics()
        if counted.failed is not None:
            await asyncio.Event().wait()  # never READY: `_engine_failed` is about to end us with its reason
        self._own_tokens = counted.prompt_tokens, counted.generated_tokens
        gc.collect()
        gc.freeze()  # what lives now lives to the end: later collections need not look at it
        self._ledger.enter(Phase.READY)
        self._state.status = "ready"
        self._log_ready(runtime)

    async def _header_is_read(self, directory: Directory, architecture: Architecture) -> None:
        """Check the vocabulary before anything is allocated.

        Then the tokenizer is built beside the upload.
        """
        await asyncio.to_thread(check_text, directory.metadata, directory.path)
        timeout_s = self._config.template_timeout
        n_vocab = architecture.n_vocab
        building = build_text(directory.metadata, directory.path, n_vocab, template_timeout_s=timeout_s)
        self._text = asyncio.create_task(building)
        log_event(
            logger,
            logging.INFO,
            "loading",
            version=__version__,
            model=self._name,
            architecture=architecture.name,
            nbytes=directory.nbytes,
            listening=",".join(self._listening.places),
        )
        for note in architecture.notes:
            logger.info(note)

    def _warmed(self) -> None:
        self._n_warmed += 1

    def _log_ready(self, runtime: Runtime) -> None:
        r = self._ledger.statistics()
        log_event(
            logger,
            logging.INFO,
            "ready",
            seconds=round(r.elapsed_s, 3),
            nbytes=r.bytes_resident,
            bytes_per_s=round(r.bytes_per_s),
            device=r.device,
            transfer=r.transfer,
            n_ctx=runtime.model.plan.n_ctx,
            sequences=runtime.model.plan.max_sequences,
            pages=runtime.model.plan.n_pages,
        )

    # ---- while it lives ------------------------------------------------------------------------------------

    async def _report(self) -> None:
        """STATUS and patience from real progress while loading.

        The watchdog from the loop's and the engine's.
        """
        seen: object = None
        while True:
            if self._state.status == "loading":
                r = self._ledger.statistics()
                progress = (r.phase, r.bytes_resident, tuple(r.bytes_by_state.values()), self._n_warmed)
                self._notifier.status(status_line(r), extend_s=EXTEND_S if progress != seen else None)
                seen = progress
            if self._watchdog_s is not None and self._engine_advances(2 * self._watchdog_s):
                self._notifier.watchdog()
            loading_s = REPORT_S if self._state.status == "loading" else 1.0
            await asyncio.sleep(min(loading_s, self._watchdog_s or loading_s))

    def _engine_advances(self, patience_s: float) -> bool:
        """False when the engine has work and has not finished a step for `patience_s`."""
        return self._runtime is None or self._runtime.engine.statistics().last_step_age_s < patience_s

    async def _reload(self) -> None:
        """Read the configuration anew; load the model anew when its file has changed."""
        try:
            new = load_config(self._config.flags, file=self._config.config_file)
            changes = changed_options(self._config, new)
            keys = read_keys(new.api_key_file)
        except GgufdError as error:
            log_event(logger, logging.ERROR, "reload refused", error=str(error))
            return
        if vars(keys) != vars(self._state.keys) and "api_key_file" not in changes.live:
            changes.live.append("api_key_file")  # the same file with other keys in it
        self._state.keys = keys
        self._config = replace(self._config, **{name: getattr(new, name) for name in changes.live})
        self._state.limits = Limits.of(self._config)
        vars(self._state.rules).update(vars(replace(_rules(self._config), refused=self._state.rules.refused)))
        logging.getLogger().setLevel(self._config.log_level.upper())
        needs_restart = ",".join(changes.restart)
        log_event(
            logger, logging.INFO, "reloaded", applied=",".join(changes.live), needs_restart=needs_restart
        )
        runtime = self._runtime
        if runtime is None:
            return
        is_new = has_changed(runtime.model.directory)
        wanted = replace(self._config, **{name: getattr(new, name) for name in changes.model})
        if (is_new or changes.model) and await self._can_replace(runtime, wanted):
            self._config = wanted
            why = "the model file has changed" if is_new else "options of the model have changed"
            log_event(logger, logging.INFO, why, applied=",".join(changes.model))
            await self._replace_model(runtime, is_new)

    async def _can_replace(self, runtime: Runtime, wanted: Config) -> bool:
        """What the header and the plan can tell, before the resident model is given up."""
        try:
            directory, architecture = await asyncio.to_thread(read_model, self._path)
            await asyncio.to_thread(check_text, directory.metadata, directory.path)
            options = StartOptions.of(wanted, self._path)
            await asyncio.to_thread(runtime.plan_instead, options, directory, architecture)
        except GgufdError as error:
            log_event(logger, logging.ERROR, "reload refused", error=str(error))
            return False
        return True

    async def _replace_model(self, old: Runtime, is_new: bool) -> None:
        """Finish what runs, free the old model, load the file; requests hear that it is loading.

        The same file is loaded over the same ground, where its pages may still be registered.
        """
        self._state.status = "loading"
        self._ledger = Ledger(model=self._name)  # nothing says ready while the old model's requests finish
        await old.engine.drain(self._config.drain_timeout)
        self._state.backend = self._runtime = None
        await self._close_text()
        gc.unfreeze()
        keeps_ground = not is_new and bool(old.ground.sources)
        left = await asyncio.to_thread(old.leave_ground if keeps_ground else old.close)
        await self._bring_up(old.ground if left else None)

    # ---- going ---------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._hangup.set()
            return
        if self._ending.done():  # the second signal: at once, by the signal itself
            if self._loop.time() < self._echo_until_s:
                return
            self._listening.close()
            self._loop.remove_signal_handler(number)
            os.kill(os.getpid(), number)
        self._end(number)

    def _engine_failed(self, error: Exception) -> None:
        """On the engine's thread, before any request hears of it."""
        self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, cause: int | Exception) -> None:
        if self._ending.done():
            return
        self._was_ready = self._state.status == "ready"
        if isinstance(cause, Exception):  # at once: whose request ends by it must not find "ready"
            self._state.status = "failed"
        self._ending.set_result(cause)

    def _announce_end(self, cause: int | Exception) -> threading.Timer:
        """From now on nothing says ready. The timer ends the process when something hangs."""
        failed = isinstance(cause, Exception)
        if isinstance(cause, Exception):
            self._ledger.fail(cause)
        else:
            log_event(logger, logging.INFO, "stopping", signal=signal.Signals(cause).name)
        self._ledger.drain()
        self._state.status = "failed" if failed else "draining"
        patience_s = self._config.drain_timeout + FREE_S if self._was_ready else STOP_S
        last_word = f"failed: {readable(str(cause))}" if failed else "draining"
        self._notifier.stopping(last_word, extend_s=patience_s)
        alarm = threading.Timer(patience_s, self._give_up)
        alarm.daemon = True
        alarm.start()
        return alarm

    def _give_up(self) -> None:
        """Something does not end: leave without it. On the timer's thread."""
        log_event(logger, logging.ERROR, "the end takes too long: leaving")
        self._listening.close()
        os._exit(GgufdError.exit_code)

    async def _drain(self, cause: int | Exception) -> None:
        """Let running requests finish, or hear of the failure."""
        if self._runtime is None:
            return
        if isinstance(cause, Exception):
            await asyncio.sleep(FAREWELL_S)
        elif not await self._runtime.engine.drain(self._config.drain_timeout):
            log_event(logger, logging.WARNING, "requests were cut by the drain's end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._state.wait_idle()  # their last bytes are being written

    async def _free(self) -> None:
        await self._http.cleanup()
        self._listening.close()
        await self._close_text()
        if self._runtime is not None:
            await asyncio.to_thread(self._runtime.close)

    async def _close_text(self) -> None:
        if self._text is not None:
            self._text.cancel()
            (built,) = await asyncio.gather(self._text, return_exceptions=True)
            if isinstance(built, TextWork):
                built.close()
            self._text = None

    # ---- what others see -----------------------------------------------------------------------------------

    def _residency(self, with_layers: bool) -> dict[str, Any]:
        return residency_object(self._ledger, self._runtime, with_layers=with_layers)

    def _connections(self) -> tuple[int, int]:
        return self._http.n_connections, self._state.rules.refused

    def _snapshot(self) -> Snapshot:
        return snapshot(self._ledger, self._runtime, self._steps, self._own_tokens)


# ---- pure --------------------------------------------------------------------------------------------------


def _rules(config: Config) -> ConnectionRules:
    return ConnectionRules(
        max_connections=config.max_connections,
        header_timeout_s=config.header_timeout,
        uids=config.allow_uid,
        gids=config.allow_gid,
    )
