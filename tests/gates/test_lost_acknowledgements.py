"""A commit that happened and was not acknowledged: the run goes on from the truth, without a restart.

The whole backend in this process, on a pretended device, trains four steps. At one commit of its ledger the
acknowledgement is lost: over SQLite the error comes back after the commit, or before it, when the writer
takes longer than its callers wait; over PostgreSQL a proxy cuts the connection instead of passing on the
answer.
Every step must be there once, calls must get the last one, and the adapter must have the bytes of the run
without a fault.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from insitu.backend import serve
from insitu.backend.ledger import Ledger, ledger
from insitu.backend.plan.settings import Publication
from insitu.database.writer import GroupCommitWriter
from insitu.errors import InsituError, Unavailable
from insitu.types import JobState
from tests.gates import test_device
from tests.gates.gate import gate
from tests.gates.test_device import World, ended, in_memory, model, running, scores
from tests.support.postgres import Cluster
from tests.support.pretended_device import SMALL, StandinScores

__all__ = ["in_memory", "model", "scores"]
pytestmark = pytest.mark.timeout(600)

NUM_STEPS = 4
CALLER_SECONDS = 0.5
"""How long callers of the ledger wait, where its writer is made slow."""


class Losses:
    """Counts the commits of the ledger from `armed` on; the `at`-th one is not acknowledged."""

    def __init__(self) -> None:
        self.at = 0
        self.number = 0
        self.armed = False
        self.of_steps: list[int] = []
        """The numbers of the commits of steps, in a life without a fault."""

    def due(self) -> bool:
        self.number += self.armed
        return self.armed and self.number == self.at


def _after_the_commit(losses: Losses, patch: pytest.MonkeyPatch) -> None:
    """The commit happens, and its callers get an error."""
    real = GroupCommitWriter._commit

    def commit(self: GroupCommitWriter, batch: list[Any]) -> None:
        if not losses.due():
            real(self, batch)
            return
        done = [type(pending)(pending.operation) for pending in batch]
        real(self, done)
        for pending, other in zip(batch, done, strict=True):
            lost = Unavailable("the ledger cannot write: the server does not answer")
            lost.__cause__ = OperationalError("COMMIT", {}, Exception("the connection was closed"))
            pending.future.set_exception(other.future.exception() or lost)

    patch.setattr(GroupCommitWriter, "_commit", commit)


def _after_the_deadline(losses: Losses, patch: pytest.MonkeyPatch) -> None:
    """The commit happens after its callers have given up."""
    real = GroupCommitWriter._commit

    def commit(self: GroupCommitWriter, batch: list[Any]) -> None:
        if losses.due():
            time.sleep(2 * CALLER_SECONDS)
        real(self, batch)

    patch.setattr(GroupCommitWriter, "_commit", commit)
    run = GroupCommitWriter.run

    def hurried(self: GroupCommitWriter, operation: Any) -> Any:
        return run(self, operation, CALLER_SECONDS if losses.armed else 60.0)

    patch.setattr(GroupCommitWriter, "run", hurried)


LOSSES: dict[str, Callable[[Losses, pytest.MonkeyPatch], None]] = {
    "after the commit": _after_the_commit,
    "after the deadline": _after_the_deadline,
}


async def train(world: World, losses: Losses) -> None:
    """Queue four steps, one after the other, as a client that repeats a request without an answer."""
    work = asyncio.create_task(
        world.supervisor._work(world.registrar, world.runner, world.leases, world.ledger)
    )
    losses.armed = True
    try:
        for step in range(NUM_STEPS):
            while True:
                try:
                    job = await asyncio.to_thread(world.queue, "run", step)
                    break
                except InsituError:
                    await asyncio.sleep(0.1)
            deadline = time.monotonic() + 60
            while (await _read(world.ledger.get_job, job.id)).state is not JobState.SUCCEEDED:
                found = await _read(world.ledger.get_job, job.id)
                assert found.state is not JobState.FAILED, found.error
                assert time.monotonic() < deadline, f"step {step + 1} is {found.state}"
                await asyncio.sleep(0.02)
        losses.armed = False
        deadline = time.monotonic() + 30
        while world.traffic.latest.get("run") != NUM_STEPS:
            assert time.monotonic() < deadline, f"calls get step {world.traffic.latest.get('run')}"
            await asyncio.sleep(0.02)
    finally:
        await ended(work)


async def _read(read: Callable[[str], Any], name: str) -> Any:
    while True:
        try:
            return await asyncio.to_thread(read, name)
        except InsituError:
            await asyncio.sleep(0.1)


async def live(
    state: Path, model: Path, scores: StandinScores, publication: Publication, losses: Losses
) -> list[bytes]:
    async with running(state, SMALL, model, scores, publication) as world:
        await train(world, losses)
        assert world.ledger.get_run("run").step == NUM_STEPS
        assert [step.step for step in world.ledger.steps("run")] == list(range(1, NUM_STEPS + 1))
        assert len({step.job_id for step in world.ledger.steps("run")}) == NUM_STEPS
        return world.learned("run", NUM_STEPS)


@contextmanager
def quick() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "_STORAGE_AGAIN_SECONDS", 0.05)
        patch.setattr(ledger, "_ASKING_AGAIN_SECONDS", 0.05)
        yield patch


async def every_loss(
    folder: Path,
    model: Path,
    scores: StandinScores,
    publication: Publication,
    losses: Losses,
    every: int,
) -> None:
    """Live without a fault, then once for every `every`-th of its commits."""
    commit_step = Ledger.commit_step

    def noted(*args: Any) -> Any:
        losses.of_steps.append(losses.number + 1)
        return commit_step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "commit_step", noted)
        whole = await live(folder / "whole", model, scores, publication, losses)
    num_commits = losses.number
    assert len(losses.of_steps) == NUM_STEPS
    assert num_commits >= 10 * NUM_STEPS // 2, "the ledger writes less than it did: what is counted?"
    others = 0
    tried = sorted({*range(every, num_commits + 1, every), *losses.of_steps[: None if every == 1 else 2]})
    for losses.at in tried:
        losses.number = 0
        learned = await live(folder / str(losses.at), model, scores, publication, losses)
        others += learned != whole
    gate(f"lost acknowledgements, {len(tried)} of {num_commits} commits, {publication}", others, 0, "runs")


@pytest.mark.parametrize(
    ("publication", "lost"), [("adapter", "after the commit"), ("merged", "after the deadline")]
)
async def test_a_run_goes_on_from_the_truth(
    in_memory: Path, model: Path, scores: StandinScores, publication: Publication, lost: str
) -> None:
    losses = Losses()
    with quick() as patch:
        LOSSES[lost](losses, patch)
        await every_loss(in_memory, model, scores, publication, losses, every=13)


@pytest.mark.sweep
@pytest.mark.parametrize("lost", LOSSES)
@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_at_every_commit(
    in_memory: Path, model: Path, scores: StandinScores, publication: Publication, lost: str
) -> None:
    losses = Losses()
    with quick() as patch:
        LOSSES[lost](losses, patch)
        await every_loss(in_memory, model, scores, publication, losses, every=1)


class Proxy:
    """In front of PostgreSQL: cuts a connection instead of passing on the answer to a COMMIT."""

    def __init__(self, server: Path, losses: Losses) -> None:
        self._server, self._losses = server, losses
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._server))
            cut = threading.Event()
            threading.Thread(target=self._up, args=(client, server, cut), daemon=True).start()
            threading.Thread(target=self._down, args=(client, server, cut), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket, cut: threading.Event) -> None:
        try:
            while data := client.recv(65_536):
                if b"COMMIT\x00" in data and self._losses.due():
                    cut.set()
                server.sendall(data)
        except OSError:
            pass
        server.close()

    def _down(self, client: socket.socket, server: socket.socket, cut: threading.Event) -> None:
        try:
            while data := server.recv(65_536):
                if cut.is_set():  # the server has answered, so it is committed
                    client.shutdown(socket.SHUT_RDWR)
                    break
                client.sendall(data)
        except OSError:
            pass
        client.close()


async def _over_postgres(
    in_memory: Path, model: Path, scores: StandinScores, publication: Publication, every: int
) -> None:
    losses = Losses()
    cluster = Cluster(durable=False)
    proxy = Proxy(cluster.folder / ".s.PGSQL.5432", losses)
    try:
        with quick() as patch:
            patch.setattr(test_device, "ledger_url", _each_its_own(cluster, proxy))
            await every_loss(in_memory, model, scores, publication, losses, every)
    finally:
        proxy.close()
        cluster.stop()


def _each_its_own(cluster: Cluster, proxy: Proxy) -> Callable[[Path], str]:
    def url(state: Path) -> str:
        name = f"life{state.name}"
        cluster.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://insitu@127.0.0.1:{proxy.port}/{name}"

    return url


async def test_a_run_goes_on_from_the_truth_over_postgres(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    await _over_postgres(in_memory, model, scores, "adapter", every=25)


@pytest.mark.sweep
@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_at_every_commit_over_postgres(
    in_memory: Path, model: Path, scores: StandinScores, publication: Publication
) -> None:
    await _over_postgres(in_memory, model, scores, publication, every=1)
