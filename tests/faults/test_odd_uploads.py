"""A real backend, a thousand odd registrations, uploads and steps, and a disk that is full now and then."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from insitu.client import InsituClient
from insitu.testing.models import tiny
from insitu.types import JobState, StepSettings
from tests.support.addition import Rollouts, sample_groups, spread_rewards, train
from tests.support.backend import KEY, Backend
from tests.support.odd_bodies import CALL, JSON, RUN, STEP, TRAJECTORY, mutate

NUM_CASES = 1000
CASES_PER_ROUND = 100
CASES_ON_A_FULL_DISK = 20
DISK_BYTES = 2 * 2**30
ROUND_SECONDS = 600.0
SETTINGS = {"learning_rate": 1e-3, "max_staleness": 100, "clip_high": 0.2, "num_passes": 1}


def often(valid: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Half of the time as it is: a case that is odd in one place alone gets further."""
    return st.just(valid) | mutate(valid)


CASES: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    st.tuples(st.just("registration"), mutate(RUN) | JSON),
    st.tuples(st.just("step"), mutate(STEP) | JSON),
    st.tuples(st.just("bytes"), st.binary(max_size=200)),
    # Twice as often: what is taken here is trained on.
    *[st.tuples(st.just("upload"), st.tuples(often(TRAJECTORY), often(CALL), often(SETTINGS)))] * 2,
)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own in memory."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Leave no byte on the disk."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(2**20))
                except OSError:
                    break
        yield
    finally:
        filler.unlink()


class Sender:
    """Sends cases, and counts the answers."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self.answers: Counter[tuple[str, int]] = Counter()
        self.accepted: list[str] = []
        """Jobs that are under way, or were."""

    async def send(self, kind: str, case: Any) -> int:
        """Send one case; return the highest status that it got."""
        group = uuid.uuid4().hex
        if kind == "registration":
            return await self._ask(kind, "POST", "/v1/runs", orjson.dumps(case))
        if kind == "step":
            return await self._step(case)
        if kind == "bytes":
            return await self._ask(kind, "PUT", f"/v1/runs/honest/groups/{group}", case)
        trajectory, call, chosen = case
        if trajectory.get("rollout_id") == TRAJECTORY["rollout_id"]:
            trajectory = {**trajectory, "rollout_id": uuid.uuid4().hex}
        lines = [{"group": {"num_trajectories": 2}}, {"trajectory": trajectory}, {"call": call}]
        lines += [{"trajectory": {**TRAJECTORY, "rollout_id": group, "reward": 0.0}}, {"call": CALL}]
        body = b"\n".join(map(orjson.dumps, lines))
        status = await self._ask(kind, "PUT", f"/v1/runs/honest/groups/{group}", body)
        return max(status, await self._step({"groups": [group], "settings": chosen}))

    async def _step(self, body: Any) -> int:
        return await self._ask("step", "POST", "/v1/runs/honest/steps", orjson.dumps(body))

    async def _ask(self, kind: str, method: str, path: str, body: bytes) -> int:
        headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": uuid.uuid4().hex}
        headers["Content-Type"] = "application/x-ndjson" if method == "PUT" else "application/json"
        async with self._http.request(method, self._url + path, data=body, headers=headers) as answer:
            said = await answer.read()
        self.answers[kind, answer.status] += 1
        if kind == "step" and answer.status < 300:
            self.accepted.append(orjson.loads(said)["id"])
        return answer.status


@pytest.mark.sweep
@pytest.mark.timeout(7200)
async def test_no_input_and_no_full_disk_ends_the_backend(tmp_path: Path) -> None:
    cases = drawn()
    with small_disk(tmp_path / "disk") as disk:
        arguments = ["--model", str(tiny()), "--model-name", "tiny", "--max-seq-length", "256"]
        backend = Backend(disk / "state", [*arguments, "--dtype", "float32"])
        backend.start()
        try:
            await backend.ready()
            assert backend.process is not None
            # The API may close an idle connection in the moment in which it would be used again.
            fresh = aiohttp.TCPConnector(force_close=True)
            async with backend.client() as client, aiohttp.ClientSession(connector=fresh) as http:
                await client.register_run("honest", "tiny")
                await client.wait_run_ready("honest", 400)
                sender = Sender(http, backend.api_url)
                rollouts = Rollouts(http, backend.gateway_url, "honest", max_tokens=8)
                pids = []
                for start in range(0, NUM_CASES, CASES_PER_ROUND):
                    async with asyncio.timeout(ROUND_SECONDS):
                        await one_round(disk, sender, cases[start : start + CASES_PER_ROUND])
                        await all_ended(client, sender.accepted)
                        await honest_step(client, rollouts)
                    status = await backend.status(http)
                    assert status is not None
                    pids.append(status["pid"])
                    print(f"\n{start + CASES_PER_ROUND} cases: {dict(sorted(sender.answers.items()))}")
                assert set(pids) == {backend.process.pid}
                print(f"{len(sender.accepted)} jobs were accepted")
                assert len(sender.accepted) > NUM_CASES / 100, "some odd inputs reached the trainer"
            assert backend.interrupt() == 0
        finally:
            backend.end()
            shutil.copytree(disk / "state" / "logs", tmp_path / "logs")


def drawn() -> list[tuple[str, Any]]:
    cases: list[tuple[str, Any]] = []

    @given(case=CASES)
    @settings(
        max_examples=NUM_CASES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list[Any](HealthCheck),
    )
    def draw(case: tuple[str, Any]) -> None:
        cases.append(case)

    draw()
    # Hypothesis may find fewer that differ.
    return (cases * 2)[:NUM_CASES]


async def one_round(disk: Path, sender: Sender, cases: list[tuple[str, Any]]) -> None:
    """Send cases; the last ones meet a full disk, where being told to come back is an answer too."""
    for kind, case in cases[:-CASES_ON_A_FULL_DISK]:
        assert await sender.send(kind, case) < 500, f"{kind}: {case}"
    with full(disk):
        for kind, case in cases[-CASES_ON_A_FULL_DISK:]:
            assert await sender.send(kind, case) in (*range(200, 500), 503, 507), f"{kind}: {case}"


async def all_ended(client: InsituClient, jobs: list[str]) -> None:
    for job in jobs:
        while (await client.get_job(job)).state in (JobState.QUEUED, JobState.RUNNING):
            await asyncio.sleep(0.2)


async def honest_step(client: InsituClient, rollouts: Rollouts) -> None:
    groups = await sample_groups(rollouts, [("Say something.", "7")] * 2, 4)
    before = (await client.get_run("honest")).step
    await train(client, [spread_rewards(group) for group in groups], StepSettings(learning_rate=1e-4))
    assert (await client.get_run("honest")).step == before + 1
