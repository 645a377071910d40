"""Promotions by command, through the real API and gateway: what calls get, what is kept, what is rejected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from fastapi import FastAPI

from insitu.access.audit_log import AUDIT_FILE
from insitu.cli import cli
from insitu.client import InsituClient
from insitu.errors import Conflict, NotFound
from insitu.types import ModelCall, Trajectory, TrajectoryGroup
from tests.support.standin_backend import KEY, StandinBackend


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_API_KEY", KEY)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[StandinBackend]:
    async with StandinBackend(tmp_path / "state", train_seconds=0.0) as started:
        async with started.client() as client:
            await client.register_run("run", "tiny")
            await client.wait_run_ready("run", 10, poll_seconds=0.02)
            for step in (1, 2, 3):
                await train(started, client, step)
        yield started


async def train(backend: StandinBackend, client: InsituClient, step: int) -> None:
    """Train a step; the gateway learns of it after its job is done."""
    call = ModelCall("c", None, "run", None, step - 1, "base", [1], [2], [-0.5], "stop")
    group = TrajectoryGroup(f"g{step}", "run", [Trajectory(f"g{step}", [], 1.0)])
    await client.put_group(group, {group.id: [call]})
    job = await client.submit_step("run", [group.id], idempotency_key=group.id)
    await client.wait_job(job.id, 60, poll_seconds=0.02)
    async with asyncio.timeout(60), backend.gateway_client() as gateway:
        while f"run@{step}" not in await gateway.models():
            await asyncio.sleep(0.02)


async def insitu(backend: StandinBackend, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, [*words, "--url", backend.api_url])


async def answered_by(backend: StandinBackend, path: str = "/v1/chat/completions") -> str:
    """The version that a call to the run's plain name records."""
    body = {"model": "run", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with backend._traffic.http.post(backend.gateway_url + path, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        call_id = answer.headers["x-insitu-call-id"]
    async with asyncio.timeout(10):
        while not backend._records.exists([call_id]):
            await asyncio.sleep(0.02)
    (call,) = backend._records.get([call_id])
    return call.policy_version


ROLLOUT = "/rollouts/r1/v1/chat/completions"


async def test_calls_get_what_is_promoted_and_rollouts_what_is_newest(backend: StandinBackend) -> None:
    told = await insitu(backend, "promote", "run@1")
    assert (told.exit_code, told.stdout) == (0, "calls to run get run@1\n")
    assert await answered_by(backend) == "run@1"
    assert await answered_by(backend, ROLLOUT) == "run@3"
    async with backend.client() as client:
        for step in (4, 5, 6):
            await train(backend, client, step)
        assert [kept.step for kept in await client.checkpoints("run")] == [1, 4, 5, 6]
    assert await answered_by(backend) == "run@1"
    assert await answered_by(backend, ROLLOUT) == "run@6"
    assert (await insitu(backend, "promote", "run@5")).exit_code == 0
    assert await answered_by(backend) == "run@5"
    assert (await insitu(backend, "rollback", "run")).stdout == "calls to run get run@1\n"
    assert await answered_by(backend) == "run@1"
    told = await insitu(backend, "promote", "run", "--newest")
    assert told.stdout == "calls to run get the newest step of run\n"
    assert await answered_by(backend) == "run@6"


async def test_a_promotion_outlives_a_restart(backend: StandinBackend) -> None:
    assert (await insitu(backend, "promote", "run@2")).exit_code == 0
    await backend.__aexit__()
    async with StandinBackend(backend.state_dir) as again:
        assert await answered_by(again) == "run@2"
        assert await answered_by(again, ROLLOUT) == "run@3"
        shown = await insitu(again, "runs", "show", "run")
        head = "run   ready, step 3; calls to run get run@2, rollouts run@3\n"
        assert shown.stdout.startswith(head), shown.stdout
        assert "1, 2 (promoted), 3" in shown.stdout
        assert json.loads((await insitu(again, "runs", "show", "run", "--json")).stdout)["served"] == "run@2"


async def test_the_decision_for_programs(backend: StandinBackend) -> None:
    made = json.loads((await insitu(backend, "promote", "run@1", "--json")).stdout)
    assert {name: made[name] for name in ("run", "step", "reason", "undoes", "back_to")} == {
        "run": "run",
        "step": 1,
        "reason": "",
        "undoes": None,
        "back_to": None,
    }
    await insitu(backend, "promote", "run@2")
    undone = json.loads((await insitu(backend, "rollback", "run", "--json")).stdout)
    assert (undone["step"], undone["undoes"]) == (1, made["id"] + 1)


async def test_mistakes_say_what_to_do(backend: StandinBackend) -> None:
    failed = (await insitu(backend, "rollback", "run")).exception
    assert isinstance(failed, Conflict)
    assert (failed.message, failed.hint) == (
        "nothing is promoted of run 'run'",
        f"promote a step: insitu promote run@STEP --url {backend.api_url}",
    )
    await insitu(backend, "promote", "run@1")
    failed = (await insitu(backend, "rollback", "run")).exception
    assert isinstance(failed, Conflict)
    assert failed.hint == f"follow the newest step: insitu promote run --newest --url {backend.api_url}"
    failed = (await insitu(backend, "promote", "run@7")).exception
    assert isinstance(failed, NotFound)
    assert "step 7 of run 'run' is not kept; kept are 0, 1, 2, 3" in failed.message
    for words in (["run"], ["run@1", "--newest"]):
        wrong = await insitu(backend, "promote", *words)
        assert (wrong.exit_code, "--newest" in wrong.stderr) == (2, True)


async def test_the_audit_log_has_the_step(backend: StandinBackend) -> None:
    await insitu(backend, "promote", "run@1")
    await insitu(backend, "promote", "run@2")
    await insitu(backend, "rollback", "run")
    await insitu(backend, "promote", "run", "--newest")
    lines = [json.loads(line) for line in (backend.state_dir / AUDIT_FILE).read_text().splitlines()]
    noted = [line["change"] for line in lines if "promot" in line["change"]]
    assert noted == [
        "PUT /v1/runs/run/promoted/1",
        "PUT /v1/runs/run/promoted/2",
        "POST /v1/runs/run/promotions/2/rollback",
        "DELETE /v1/runs/run/promoted",
    ]


async def test_merged_publication_rejects_a_promotion(app: FastAPI, http: httpx.AsyncClient) -> None:
    services = app.state.services
    services.settings = replace(services.settings, publication="merged")
    got = await http.put("/v1/runs/run/promoted/0")
    assert got.status_code == 422
    error = got.json()["error"]
    assert "merged publication serves one version at a time" in error["message"]
    assert "insitu export run@0 DIRECTORY" in error["hint"]
    assert (await http.put("/v1/runs/other/promoted/0")).status_code == 404
    assert (await http.delete("/v1/runs/run/promoted")).status_code == 200, "the way back stays open"
