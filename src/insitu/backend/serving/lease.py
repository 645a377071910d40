"""The device lease: who is on the devices, the engines or the trainer.

On shared CUDA devices they do not fit at once, so the engines sleep while the trainer is there. The order
of a step leaves room for both::

    calls held ─► engines sleep ─► trainer on: open, score, train, score, save ─► trainer off
               ─► weights wake ─► publish ─► KV cache wakes ─► engines score ─► commit ─► calls released

Everything that scores, loads, restarts or trains does so in one of the blocks below, one task at a time.
A part that fails while the devices change hands is restarted: an engine from its published state, the
trainer from its last checkpoint. On a CPU, and where engines and trainer have their own devices, nothing
sleeps and nothing moves; the blocks and their order are the same. There, the others go on without an engine
that dies: it starts beside their work and joins in the published state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import psutil

from insitu.backend.fleet.replica import EngineClient, Memory
from insitu.backend.fleet.replicas import Replica, ReplicaSet
from insitu.backend.fleet.trainer import TrainerGroup
from insitu.errors import DeadlineExceeded, InsituError, UpstreamError
from insitu.system.tasks import all_ended

_GONE_SECONDS = 10.0
_AT_ONCE = 32
"""Engines asked at the same time, far below the HTTP client's 100 connections; beyond it they take turns."""
_PARTS: tuple[Memory, ...] = ("weights", "kv_cache")
Result = TypeVar("Result")
_Failure = tuple[Replica, InsituError]
log = logging.getLogger(__name__)


async def _nothing(_engine: EngineClient) -> None:
    """Restore nothing: no version is published yet."""


class DeviceLease:
    """Owns who is on the devices of one model host.

    Blocks may nest within one task; another task waits for its turn. The deadlines of engines and trainer
    bound how long a turn can take.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        trainer: TrainerGroup,
        shared_devices: Callable[[], str | None],
        *,
        exclusive: bool,
    ) -> None:
        """`exclusive`: engines and trainer use the same devices in turn, and engines can sleep."""
        self._replicas = replicas
        self._trainer = trainer
        self._shared_devices = shared_devices
        self._exclusive = exclusive
        self.restore: Callable[[EngineClient], Awaitable[None]] = _nothing
        """Brings a fresh engine to the published state."""
        self._turn = asyncio.Lock()
        self._owner: asyncio.Task[object] | None = None
        self._asleep: dict[int, set[Memory]] = {}
        """The memory that each engine has yet to take back, by incarnation; awake engines are not listed."""
        self._trainer_is_on = False
        self._rank_pids: list[int] = []
        self._starting: set[asyncio.Task[object]] = set()
        """Tasks that start an engine without having the turn."""

    # ── blocks ──────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def handover(self) -> AsyncGenerator[None]:
        """Keep the turn from the engines to the trainer and back. Hold and drain calls around this block.

        At its end every engine is awake. One that cannot be woken or restarted takes no calls until a
        revival succeeds.
        """
        if not self._exclusive:
            yield
            return
        async with self._taken():
            try:
                yield
            finally:
                await self._bring_back()

    @asynccontextmanager
    async def trainer(self) -> AsyncGenerator[None]:
        """Have the trainer running and on the devices inside this block; afterwards it is off them again.

        The engines go on sleeping after the block, until a publication or the end of the hand-over.
        """
        if not self._exclusive:
            if not self._trainer.running:
                await self._start_trainer()
            yield
            return
        async with self._taken():
            await self._put_to_sleep()
            try:
                await self._trainer_on()
                yield
            finally:
                await self._trainer_off()

    @asynccontextmanager
    async def publication(self) -> AsyncGenerator[None]:
        """Have the engines' weights on the devices inside this block; afterwards they answer calls."""
        async with self._taken():
            await self._wake("weights")
            try:
                yield
            finally:
                await self._wake("kv_cache")

    @asynccontextmanager
    async def engines(self) -> AsyncGenerator[None]:
        """Have the engines awake inside this block, to score or to load and unload."""
        async with self._taken():
            for part in _PARTS:
                await self._wake(part)
            yield

    # ── engines ─────────────────────────────────────────────────────────────────────────────────────

    async def on_each(
        self,
        action: Callable[[EngineClient], Awaitable[Result]],
        *,
        calls_held: bool = False,
        among: Collection[str] | None = None,
    ) -> dict[int, Result]:
        """Run `action` on all engines at once, inside a block; return the results by incarnation.

        With `among` it runs on these alone, and an error names those that failed: none is replaced.

        All are awaited, also after a failure. The others go on without a dead engine where they may.
        Another that fails is replaced, and the action runs again, if no call can be on it: it is dead, or has
        not woken up fully, or `calls_held`. Otherwise an error names every engine that failed.
        """
        listed = self._replicas.replicas
        replicas = [listed[name] for name in listed if among is None or name in among]
        outcomes = await all_ended(
            [partial(action, replica.engine) for replica in replicas], at_once=_AT_ONCE
        )
        results: dict[int, Result] = {}
        failed: list[_Failure] = []
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, InsituError):
                failed.append((replica, outcome))
            else:
                results[replica.incarnation] = outcome
        if among is not None:
            if failed or len(replicas) < len(among):
                raise _named(failed, [name for name in among if name not in listed])
            return results
        dead = await self._replicas.dead() if failed else []
        if results and not self._exclusive:
            self.go_on_without([replica for replica, _ in failed if replica.id in dead])
            failed = [(replica, error) for replica, error in failed if replica.id not in dead]
        busy = [
            (replica, error)
            for replica, error in failed
            if replica.incarnation not in self._asleep and replica.id not in dead
        ]
        if busy and not calls_held:
            raise _named(busy) from busy[0][1]
        for replica, error in failed:
            fresh = await self._replace(replica, error)
            try:
                results[fresh.incarnation] = await action(fresh.engine)
            except InsituError as again:
                raise _named([(fresh, again)]) from again
        return results

    @property
    def exclusive(self) -> bool:
        """True if engines and trainer use the same devices in turn."""
        return self._exclusive

    def may_go_on_without(self, *dead: Replica) -> bool:
        """Return True if others take calls, and these can start without the devices of the others."""
        return not self._exclusive and any(
            replica.id not in {each.id for each in dead} for replica in self._replicas.joined()
        )

    def go_on_without(self, dead: list[Replica]) -> None:
        """Send no call to these engines until they are revived."""
        for replica in dead:
            replica.joined = False
            log.warning("%s is dead; the others go on without it until it is revived", replica.id)

    async def revive(self, replica: Replica) -> None:
        """Replace a dead engine, unless that has happened already.

        It starts when its turn comes; at once where it needs no devices of others and others take calls, so
        that training goes on meanwhile.
        """
        if self.may_go_on_without(replica):
            await self._start_beside(replica)
            return
        async with self._taken():
            if self._replicas.replicas.get(replica.id) is replica:
                await self._replace(replica, None)

    async def add(self) -> Replica:
        """Start one engine more, which joins in the published state; the others go on meanwhile."""
        assert not self._exclusive, "engines that sleep for the trainer are as many as were planned"
        async with self._beside():
            return await self._replicas.add(self.restore, self._taken())

    async def remove(self, replica: Replica) -> None:
        """Stop an engine that has left the table and has no calls, unless it was replaced meanwhile."""
        async with self._taken():
            if self._replicas.replicas.get(replica.id) is replica:
                await self._replicas.remove(replica)

    async def restored(self, replicas: Sequence[Replica]) -> None:
        """Bring these engines, which have no calls, to the published state at once, inside a block."""
        await self.on_each(self.restore, among=[replica.id for replica in replicas])

    async def _start_beside(self, replica: Replica) -> None:
        """Start an engine without the turn; take it to restore the engine's state, and to let it join."""
        if self._replicas.replicas.get(replica.id) is replica:
            async with self._beside():
                await self._replicas.restart(replica.id, self.restore, self._taken())

    @asynccontextmanager
    async def _beside(self) -> AsyncGenerator[None]:
        """Be cancelled by `stop` inside this block, which starts an engine without the turn."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._starting.add(task)
        try:
            yield
        finally:
            self._starting.discard(task)

    async def replace_all(self) -> None:
        """Restart all engines at once with their published state; those that can, even if others cannot."""
        async with self._taken():
            await self._trainer_off()
            replicas = list(self._replicas.replicas.values())
            restarts = [partial(self._replace, replica, None) for replica in replicas]
            outcomes = await all_ended(restarts, at_once=_AT_ONCE)
            errors = [outcome for outcome in outcomes if isinstance(outcome, InsituError)]
            for error in errors[1:]:
                log.error("an engine could not be restarted: %s", error)
            if errors:
                raise errors[0]

    async def stop(self) -> None:
        """Stop the trainer and all engines, also those that are starting."""
        for task in self._starting:
            task.cancel()
        if self._starting:
            await asyncio.wait(set(self._starting), timeout=_GONE_SECONDS)
        async with self._taken():
            await self._trainer.stop()
            await self._replicas.stop()

    async def _replace(self, replica: Replica, error: InsituError | None) -> Replica:
        """Restart an engine in its published state; it needs the devices for itself."""
        if error is not None:
            log.warning("%s is restarted: %s", replica.id, error)
        await self._trainer_off()
        self._asleep.pop(replica.incarnation, None)
        return await self._replicas.restart(replica.id, self.restore)

    async def _put_to_sleep(self) -> None:
        """Free the engines' memory. One that does not sleep is stopped; it comes back with the others."""

        async def sleep(replica: Replica) -> None:
            try:
                await replica.engine.sleep()
                self._asleep[replica.incarnation] = set(_PARTS)
            except (UpstreamError, DeadlineExceeded) as error:
                log.warning("%s is stopped, since it does not sleep: %s", replica.id, error)
                await self._replicas.end(replica)

        awake = [replica for replica in self._replicas.joined() if replica.incarnation not in self._asleep]
        await asyncio.gather(*[sleep(replica) for replica in awake])

    async def _wake(self, part: Memory) -> None:
        """Give one part of the memory back to all engines that lack it; replace those that fail."""
        waiting = [r for r in self._replicas.replicas.values() if part in self._asleep.get(r.incarnation, ())]
        if not waiting:
            return
        await self._trainer_off()
        errors = await asyncio.gather(*[self._wake_one(replica, part) for replica in waiting])
        for replica, error in zip(waiting, errors, strict=True):
            if error is not None:
                await self._replace(replica, error)

    async def _wake_one(self, replica: Replica, part: Memory) -> InsituError | None:
        try:
            await replica.engine.wake_up(part)
        except (UpstreamError, DeadlineExceeded) as error:
            return error
        self._asleep[replica.incarnation].discard(part)
        if not self._asleep[replica.incarnation]:
            del self._asleep[replica.incarnation]
        return None

    async def _bring_back(self) -> None:
        """Wake or restart every engine; one that fails both ways is stopped, to be revived later."""
        for replica in list(self._replicas.replicas.values()):
            try:
                if not replica.joined:
                    await self._replace(replica, None)
                for part in _PARTS:
                    if part in self._asleep.get(replica.incarnation, ()):
                        error = await self._wake_one(replica, part)
                        if error is not None:
                            await self._replace(replica, error)
            except InsituError:
                log.exception("%s takes no calls until it is revived", replica.id)

    # ── trainer ─────────────────────────────────────────────────────────────────────────────────────

    async def _trainer_on(self) -> None:
        """Bring the trainer onto the devices; restart ranks that cannot come."""
        self._trainer_is_on = True  # from here on memory may be taken, also by an attempt that fails
        if self._trainer.running:
            try:
                await self._trainer.on_device()
                return
            except InsituError as error:
                log.warning("the trainer is restarted, since it cannot come onto the devices: %s", error)
                await self._stop_trainer()
        await self._start_trainer()

    async def _start_trainer(self) -> None:
        try:
            await self._trainer.start(self._shared_devices())
        except InsituError:
            await self._stop_trainer()
            raise
        if self._exclusive:  # then they are on this node, and their memory must be free before others need it
            self._rank_pids = [rank["pid"] for rank in self._trainer.ranks]

    async def _trainer_off(self) -> None:
        """Take the trainer off the devices; ranks that cannot leave are killed and start again when used."""
        if not self._trainer_is_on:
            return
        if self._trainer.running:
            try:
                await self._trainer.off_device()
                self._trainer_is_on = False
                return
            except InsituError as error:
                log.warning("the trainer is stopped, since it cannot leave the devices: %s", error)
        await self._stop_trainer()
        self._trainer_is_on = False

    async def _stop_trainer(self) -> None:
        """Kill the ranks and wait until their processes, and with them their memory, are gone."""
        await self._trainer.stop()
        if left := await asyncio.to_thread(_left_of, self._rank_pids, _GONE_SECONDS):
            log.error("trainer ranks %s were killed and have not ended in %.0f s", left, _GONE_SECONDS)
        self._rank_pids = []

    # ── turns ───────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _taken(self) -> AsyncGenerator[None]:
        """Take the turn, unless this task has it already."""
        if self._owner is not None and self._owner is asyncio.current_task():
            yield
            return
        async with self._turn:
            self._owner = asyncio.current_task()
            try:
                yield
            finally:
                self._owner = None


def _named(failed: list[_Failure], missing: Sequence[str] = ()) -> InsituError:
    """Return one error with the names of all engines that failed or are gone."""
    said = [f"{name}: it is being started again" for name in missing]
    message = "; ".join(said + [f"{replica.id}: {error.message}" for replica, error in failed])
    late = not missing and all(isinstance(error, DeadlineExceeded) for _, error in failed)
    hint = failed[0][1].hint if failed else ""
    return (DeadlineExceeded if late else UpstreamError)(message, hint=hint)


def _left_of(pids: list[int], seconds: float) -> list[int]:
    """Wait for these processes to end; return those that have not."""
    processes: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, left = psutil.wait_procs(processes, timeout=seconds)
    return [process.pid for process in left if process.status() != psutil.STATUS_ZOMBIE]
