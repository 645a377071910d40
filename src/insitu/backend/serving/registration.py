"""Registration: admits runs, chooses their engine, rejects with a reason, resumes, lets go and closes."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from insitu.access.projects import named_for
from insitu.backend.fleet.placement import check_placement
from insitu.backend.ledger import Ledger
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.rows import LiveRun, Run
from insitu.backend.plan.engine import EngineSettings, check_targets, difference
from insitu.backend.plan.parsers import with_parsers
from insitu.backend.plan.serve_plan import planned, registered_engine, settings_for, with_family
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.progress.phases import SILENT, Phases, Say
from insitu.backend.serving.activity import GIVES_WAY_SECONDS, IDLE_SECONDS, Activity, by_turns
from insitu.backend.serving.fall_back import fall_back
from insitu.backend.serving.host import DamagedStep, ModelHost
from insitu.backend.serving.promotions import Promotions
from insitu.backend.serving.publication import BASE_VERSION
from insitu.backend.serving.reasons import first_line, reason_of
from insitu.backend.serving.start import write_start
from insitu.backend.serving.traffic import Traffic
from insitu.database.engine import is_outage
from insitu.errors import CannotHonour, InsituError, PlaceTaken
from insitu.types import RunState, policy_name
from insitu.wire.routing_table import NotServed, Served, ServedBase

_FILLED = 1.25
"""Calls at an engine, of those it computes at once: some are being rendered or recorded meanwhile."""
_ADMITTING_SECONDS = 2.0
"""The time after which steps have their turn, with more runs to admit."""
_AGAIN_SECONDS = 10.0
"""Between two tries to load an idle run whose step waits for the place of another."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
log = logging.getLogger(__name__)


def _nothing(_run: str) -> None:
    """Forget nothing."""


class Registrar:
    """Owns this backend's only model host and admits or rejects every registration."""

    def __init__(
        self,
        settings: ServeSettings,
        ledger: Ledger,
        traffic: Traffic,
        http: aiohttp.ClientSession,
        scratch: Path,
        say: Say,
        phases: Phases = SILENT,
    ) -> None:
        self.host: ModelHost | None = None
        self._settings = settings
        self._ledger = ledger
        self._traffic = traffic
        traffic.replicas = self._joined
        self._http = http
        self._scratch = scratch
        self._say = say
        self._phases = phases
        self._promotions = Promotions(settings, ledger, traffic, say)
        self.activity = Activity(ledger)
        self.on_idle: Callable[[str], None] = _nothing
        """Called with the name of a run that is not loaded any more."""
        self._least_rank = 0
        """The largest LoRA rank of the runs that were open at the start: the engines are for all of them."""
        self._called_up: set[str] = set()
        """Idle runs that calls wait for: if they cannot be loaded, they stay idle."""
        self._beside: set[str] = set()
        """Those that are loaded beside a step, by a task of their own."""
        self._again_at: dict[str, float] = {}

    async def resume(self) -> None:
        """Load the model of `--model` or of the open runs and publish their last steps; called at start."""
        known = await asyncio.to_thread(self._ledger.list_runs)
        loaded = [run for run in known if run.state in (RunState.READY, RunState.LOADING)]
        idle = [run for run in known if run.state is RunState.IDLE]
        for run in await self.activity.silent_runs(loaded, IDLE_SECONDS):
            if await asyncio.to_thread(self._ledger.let_idle, run):
                loaded.remove(run)
                idle.append(run)
        self._least_rank = max((run.lora.rank for run in [*loaded, *idle]), default=0)
        engine = self._settings.preloaded()
        if engine is not None:
            used_last = sorted(idle, key=lambda run: run.updated_at, reverse=True)
            for run in [*loaded, *used_last][:1]:  # runs that are loaded agree on the engine
                engine = self._registered(engine, run)
            await self._load(engine)
        for run in loaded:
            await self._admit(run)

    async def reconcile(self) -> None:
        """Load again what the ledger has at another step than calls get: an acknowledgement was lost."""
        for run in await asyncio.to_thread(self._ledger.live_runs):
            if run.state is RunState.READY and self._traffic.latest.get(run.name) != run.step:
                log.warning("run %s is at step %d in the ledger: it is loaded again", run.name, run.step)
                await asyncio.to_thread(self._ledger.transition_run, run.name, RunState.LOADING)

    async def admit_runs(self) -> None:
        """Admit newly registered runs, stop serving closed or failed ones, and serve what is promoted."""
        live = await asyncio.to_thread(self._ledger.live_runs)
        for name in self._traffic.runs.keys() - {run.name for run in live}:
            await self._drop(name)  # closed, failed or deleted
        began = time.monotonic()
        for run in by_turns(run for run in live if run.state is not RunState.READY):
            if time.monotonic() - began > _ADMITTING_SECONDS:
                break  # the others come after the next step, if one waits
            if run.state is RunState.LOADING:  # it was idle, or the end of its admission was not recorded
                found = await asyncio.to_thread(self._ledger.get_run, run.name)
                if run.name not in self._beside and found.state is RunState.LOADING:  # no task has loaded it
                    await self._admit(found)
            else:
                if run.name in self._traffic.runs:  # closed, perhaps deleted, since it was admitted
                    await self._drop(run.name)
                found = await asyncio.to_thread(self._ledger.get_run, run.name)
                self._say(f"run {run.name} (project {found.project}) is registered on {found.base_model}")
                await self._admit(found)
        if self._settings.publication == "adapter":  # merged weights stay until another run needs the place
            for run in await self.activity.silent_runs(self._routed(live), IDLE_SECONDS):
                await self._let_go(run)
        await self.activity.note(self._traffic.runs)
        await self._wake_for_steps()
        await self._promotions.tend([run.name for run in live], self.host)

    async def call_up(self, wanted: Sequence[str], tasks: asyncio.TaskGroup) -> None:
        """Load the idle runs among those that calls wait for; tell the gateways which will not come."""
        if not wanted:
            return
        states = await asyncio.to_thread(self._ledger.run_states, wanted)
        answers: dict[str, NotServed] = {}
        for name in wanted:
            state = states.get(name)
            if state is RunState.IDLE and name not in self._called_up:
                taken = await self._taken(name)
                if taken is not None:
                    answers[name] = NotServed(taken.message, taken.hint, held=True)
                    continue
                self._called_up.add(name)
                if self._loads_beside_steps:
                    self._beside.add(name)
                    tasks.create_task(self._bring_back(name))
                else:
                    await self._wake_at_next_turn(name)
            elif state is RunState.DAMAGED:
                answers[name] = NotServed(f"run {name} is damaged", f"see insitu runs show {name}", held=True)
            elif state in (None, RunState.FAILED, RunState.CLOSED):
                answers[name] = NotServed()
        if answers:
            self._traffic.answer(answers)
            await self._traffic.offer()

    @property
    def _loads_beside_steps(self) -> bool:
        """True if an adapter can be loaded while a step trains: nothing is held, nothing is replaced."""
        settings = self._settings
        apart = settings.placement == "dedicated" and not settings.four_bit_base
        return settings.publication == "adapter" and apart and self.host is not None

    async def _bring_back(self, name: str) -> None:
        """Load one idle run, if that needs no other engine; otherwise it waits for the end of the step."""
        try:
            run = await asyncio.to_thread(self._ledger.get_run, name)
            fits = self.host is not None and self.host.engine == await self._engine_or_none(run)
            if await asyncio.to_thread(self._ledger.wake_run, name) and fits and (run.step or not run.source):
                await self._admit(run)
        except (InsituError, OSError):  # it is loading in the ledger, or idle as before: it is tried again
            log.exception("run %s could not be brought back", name)
            self._called_up.discard(name)
        finally:
            self._beside.discard(name)

    async def _wake_at_next_turn(self, name: str) -> None:
        try:
            await asyncio.to_thread(self._ledger.wake_run, name)
        except InsituError:  # it is idle as before: the next look at the calls tries again
            self._called_up.discard(name)
            raise

    async def _engine_or_none(self, run: Run) -> EngineSettings | None:
        try:
            return await asyncio.to_thread(self._wanted_engine, run)
        except CannotHonour:
            return None

    async def _wake_for_steps(self) -> None:
        """Load idle runs that have steps in the queue; one whose place is taken is tried again later."""
        names = await asyncio.to_thread(self._ledger.runs_with_open_jobs)
        now = time.monotonic()
        self._again_at = {name: at for name, at in self._again_at.items() if at > now and name in names}
        for name in sorted(names - self._traffic.runs.keys() - self._again_at.keys()):
            if await asyncio.to_thread(self._ledger.wake_run, name):
                self._again_at[name] = now + _AGAIN_SECONDS

    def _routed(self, live: Sequence[LiveRun]) -> list[LiveRun]:
        return [run for run in live if run.state is RunState.READY and run.name in self._traffic.runs]

    async def _taken(self, name: str) -> PlaceTaken | None:
        """Return who has the only place, if that is another run that is active."""
        if self._settings.publication != "merged":
            return None
        live = await asyncio.to_thread(self._ledger.live_runs)
        others = [run for run in live if run.name != name and run.name in self._traffic.runs]
        active = await self.activity.active_runs(others, GIVES_WAY_SECONDS)
        return self._place_taken(name, active[0].name) if active else None

    def _place_taken(self, name: str, holder: str) -> PlaceTaken:
        shown = named_for(name, holder)
        return PlaceTaken(
            f"merged publication serves the weights of one run at a time, now {shown}, which is active",
            hint=f"wait until it has ended; if nobody works with it any more: insitu runs release {shown}; "
            "or serve with --publication adapter",
        )

    async def _let_go(self, run: LiveRun) -> bool:
        """Let a run go idle: nothing in memory knows it any more. Return False if it is active after all."""
        if not await asyncio.to_thread(self._ledger.let_idle, run):
            return False
        log.info("run %s is idle at step %d", run.name, run.step)
        await self._drop(run.name)
        return True

    async def _make_room(self, run: Run) -> bool:
        """Let the other runs go idle if nobody works with any of them; return True if room was made."""
        live = await asyncio.to_thread(self._ledger.live_runs)
        others = [other for other in self._routed(live) if other.name != run.name]
        silent = await self.activity.silent_runs(others, GIVES_WAY_SECONDS)
        if not others or len(silent) < len(others):
            return False
        return all([await self._let_go(other) for other in silent])

    def _joined(self) -> dict[str, str]:
        joined = self.host.replicas.joined() if self.host is not None else []
        return {replica.id: replica.engine.url for replica in joined}

    async def _admit(self, run: Run) -> None:
        """Make a run ready, or mark it failed with the reason."""
        try:
            wanted = await self._engine_of(run)
            await asyncio.to_thread(self._ledger.transition_run, run.name, RunState.LOADING)
            if self.host is None or self.host.engine != wanted:
                await self._load(wanted)
            assert self.host is not None
            check_targets(wanted, run.lora.targets(self.host.trainer.linear_layers))  # not at the first step
            await asyncio.to_thread(self._keep_precision, run)
            with self._phases.phase(f"loading run {run.name}, step {run.step}"):
                before = await self._open(run, self.host)
            await asyncio.to_thread(self._ledger.transition_run, run.name, RunState.READY)
        except Exception as error:  # whatever a registration asks for ends that run, not the backend
            if is_outage(error):  # nothing is wrong with the run; it is admitted when the database is back
                raise
            log.exception("run %s cannot be served", run.name)
            reason = reason_of(error)
            self._phases.say(f"run {run.name} cannot be served: {first_line(reason)}")
            await self._rejected(run, error, reason)
        else:
            await self._unload(run.name, list(before.values()), self.host)
        finally:
            self._called_up.discard(run.name)

    async def _rejected(self, run: Run, error: Exception, reason: str) -> None:
        """Leave a run idle that was idle before or whose place is taken; others have failed."""
        taken = isinstance(error, PlaceTaken)
        if not taken and run.name not in self._called_up:
            await asyncio.to_thread(self._ledger.transition_run, run.name, RunState.FAILED, reason)
            return
        await asyncio.to_thread(self._ledger.transition_run, run.name, RunState.LOADING)
        await asyncio.to_thread(self._ledger.transition_run, run.name, RunState.IDLE, reason)
        hint = error.hint if isinstance(error, InsituError) else "retry later"
        self._traffic.answer({run.name: NotServed(first_line(reason), hint, held=taken)})
        await self._traffic.offer()
        for job in await asyncio.to_thread(self._ledger.next_jobs, [run.name]):
            await asyncio.to_thread(self._ledger.set_waiting, job.id, f"waits: {first_line(reason)}")

    async def _open(self, run: Run, host: ModelHost) -> dict[int, Served]:
        """Publish the run's last step and route to it; return the versions of an earlier loading."""
        handed_over = run.source is not None and self._settings.placement != "dedicated"
        in_place = bool(run.step or run.source)
        async with self._calls_held(f"run {run.name} is loaded", in_place=in_place, handed_over=handed_over):
            await write_start(run, host, self._ledger)
            run, served = await self._publish(run, host)
            await self._promotions.open(run, host)
            before = self._traffic.runs.pop(run.name, {})
            self._traffic.serve_version(run.name, run.step, served)
        await self._traffic.push()
        return before

    async def _publish(self, run: Run, host: ModelHost) -> tuple[Run, Served]:
        """Publish the run's last step, or the newest whole one if that is damaged."""
        try:
            return run, await host.publish_committed(run)
        except DamagedStep:
            behind, said = await asyncio.to_thread(fall_back, self._ledger, self._settings.runs_dir, run)
            log.warning("%s", said)
            self._say(said)
            return behind, await host.publish_committed(behind)

    @asynccontextmanager
    async def _calls_held(
        self, reason: str, *, in_place: bool, handed_over: bool = False
    ) -> AsyncGenerator[None]:
        """Hold and drain calls if weights replace others in place, or the trainer the engines."""
        in_place = in_place or self._settings.four_bit_base
        if not handed_over and (self._settings.publication == "adapter" or not in_place):
            yield
            return
        async with self._traffic.held(reason):
            await self._traffic.drained(self._settings.deadlines.drain)
            yield

    def _keep_precision(self, run: Run) -> None:
        """Record the run's precision; tell the user when a trained run continues in a different one."""
        dtype, before = self._settings.dtype, self._ledger.precisions().get(run.name)
        if run.step and before != dtype:
            so_far = before or "a precision that is not on record"
            self._say(f"run {run.name} was trained in {so_far} until step {run.step}; it goes on in {dtype}")
        if before != dtype:
            self._ledger.set_precision(run.name, dtype)

    async def _engine_of(self, run: Run) -> EngineSettings:
        """Return the engine settings the run asks for; runs that nobody works with make room for it."""
        try:
            return await asyncio.to_thread(self._wanted_engine, run)
        except PlaceTaken:
            if not await self._make_room(run):
                raise
            return await asyncio.to_thread(self._wanted_engine, run)

    def _wanted_engine(self, run: Run) -> EngineSettings:
        """Return the engine settings the run asks for; reject them if other runs use a different engine."""
        others = [name for name in self._traffic.runs if name != run.name]
        if others and self._settings.publication == "merged":
            raise self._place_taken(run.name, others[0])
        if run.promoted is not None and self._settings.publication == "merged":
            raise CannotHonour(
                f"{policy_name(run.name, run.promoted)} is promoted, but merged publication serves one "
                "version at a time, the newest",
                hint=f"serve with --publication adapter, or: insitu promote {run.name} --newest",
            )
        base = self._base_engine(run)
        wanted = self._registered(base, run)
        if wanted.lora_modules is not None:
            run.lora.targets(wanted.lora_modules)
        current = self.host.engine if self.host is not None else None
        if others and current is not None and wanted.max_lora_rank > current.max_lora_rank:
            raise PlaceTaken(
                f"run {run.name} has LoRA rank {run.lora.rank}; beside other runs this backend takes up to "
                f"{current.max_lora_rank}",
                hint=f"start the backend with --max-lora-rank {wanted.max_lora_rank}, or use rank "
                f"{current.max_lora_rank}",
            )
        if others and current is not None and current != wanted:
            named = ", ".join(dict.fromkeys(named_for(run.name, other) for other in others))
            raise PlaceTaken(
                f"run {run.name} needs an engine with other settings than {named}: "
                f"{difference(current, wanted)}",
                hint="remove these arguments, or close the other runs: insitu runs close NAME",
            )
        return wanted

    def _base_engine(self, run: Run) -> EngineSettings:
        """Return the current engine if it serves the run's base model, else a new one by hub id."""
        for known in (self.host.engine if self.host is not None else None, self._settings.preloaded()):
            if known is not None and run.base_model in (known.served_name, known.model):
                return known
        serves = f"; this backend serves {self.host.engine.served_name}" if self.host is not None else ""
        if not _HUB_ID.fullmatch(run.base_model):
            raise CannotHonour(
                f"base model {run.base_model!r} is not a model name{serves}",
                hint="name the served model or a hub id; directories are given to `insitu serve --model`",
            )
        if self._settings.model is not None:
            raise CannotHonour(
                f"base model {run.base_model} is not the one that was started{serves}",
                hint="name the served model, or start a second backend",
            )
        if self.host is not None and self._traffic.runs:
            raise PlaceTaken(
                f"base model {run.base_model} cannot be loaded beside runs on another one{serves}",
                hint="close those runs first",
            )
        settings, lines = with_family(self._settings, run.base_model)
        settings, _ = planned(settings, run.base_model)
        settings, more = with_parsers(settings, run.base_model)
        for line in [*lines, *more]:
            self._say(line)
        return settings.engine(run.base_model, run.base_model)

    def _registered(self, base: EngineSettings, run: Run) -> EngineSettings:
        there = 0 if self.host is None else self.host.engine.max_lora_rank
        rank = max(run.lora.rank, self._least_rank, there)
        return registered_engine(self._settings, base, run.engine_args, run.init_args, rank)

    async def _load(self, engine: EngineSettings) -> None:
        """Replace the current engines and trainer with ones for these settings.

        The devices rarely hold both, so the old ones stop first. If the new ones fail, the old come back.
        """
        settings = await asyncio.to_thread(settings_for, self._settings, engine)
        old = self.host
        if old is None:
            await self._start(settings, engine)
            return
        await check_placement(settings, engine)  # before what runs is stopped for it
        log.info("replacing the engine: %s", difference(old.engine, engine))
        self.host = None
        await self._traffic.push()
        await old.stop()
        try:
            await self._start(settings, engine)
        except InsituError as error:
            self._say(
                f"the engine with other settings did not start; the one before is started again: {error}"
            )
            await self._start(old.settings, old.engine)
            raise

    async def _start(self, settings: ServeSettings, engine: EngineSettings) -> None:
        host = ModelHost(settings, engine, self._ledger, self._http, self._scratch, self._phases)
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(host.stop)
            await host.start()
            on_failure.pop_all()
        self.host = host
        self._traffic.base = self._base_card(engine)
        self._traffic.max_loras = engine.max_loras
        self._traffic.places = max(1, math.ceil(_FILLED * engine.max_num_seqs / settings.num_gateways))
        await self._traffic.push()

    @staticmethod
    def _base_card(engine: EngineSettings) -> ServedBase:
        return ServedBase(engine.served_name, engine.served_name, BASE_VERSION)

    async def _drop(self, run: str) -> None:
        """Stop routing to a closed or deleted run and free its resources; what cannot be freed is logged."""
        versions = list(self._traffic.runs.get(run, {}).values())
        promoted = self._traffic.promoted.get(run)
        if promoted is not None and promoted.served is not None and promoted.served not in versions:
            versions.append(promoted.served)
        self._traffic.drop_run(run)
        self.activity.forget(run)
        self._promotions.forget(run)
        self.on_idle(run)
        await self._traffic.offer()
        if self.host is None:
            return
        try:
            await self._free(run, versions, self.host)
        except (InsituError, OSError):
            log.exception("run %s is closed, but not all of it could be freed", run)
        await self._unload(run, versions, self.host)

    async def _free(self, run: str, versions: list[Served], host: ModelHost) -> None:
        await host.trainer.forget_run(run)
        if self._settings.publication == "merged":
            is_base = all(served.version == BASE_VERSION for served in versions)
            async with self._calls_held(f"run {run} is closed", in_place=not is_base):
                await host.reset()
                self._traffic.base = self._base_card(host.engine)
            run_dir = checkpoints.run_directory(self._settings.runs_dir, run)
            await asyncio.to_thread(checkpoints.remove_merged, run_dir)

    async def _unload(self, run: str, versions: list[Served], host: ModelHost) -> None:
        """Unload adapters that are not routed any more, each when its last call has ended."""
        try:
            for served in versions:
                if served.engine_model != host.engine.served_name and not self._traffic.is_claimed(served):
                    await self._traffic.drained(self._settings.deadlines.drain, served.version)
                    await host.retire(served)
        except InsituError:
            log.exception("old versions of run %s stay for now", run)
