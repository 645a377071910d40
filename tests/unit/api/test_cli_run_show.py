"""`insitu runs show` against a backend that trained: what people read, and the object for programs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from insitu.cli import cli
from insitu.client import InsituClient
from insitu.errors import NotFound
from insitu.types import RunState
from tests.support.standin_backend import StandinBackend

from .test_api_checkpoints import train


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[StandinBackend]:
    async with StandinBackend(tmp_path / "state", train_seconds=0.0, keep_checkpoints=2) as started:
        yield started


@pytest.fixture
async def client(backend: StandinBackend) -> AsyncIterator[InsituClient]:
    """A run with three steps, the first of which is pinned."""
    async with backend.client() as opened:
        await opened.register_run("run", "tiny")
        await opened.wait_run_ready("run", 10, poll_seconds=0.02)
        await train(opened, 1)
        await opened.pin_checkpoint("run", 1)
        await train(opened, 2, 3)
        yield opened


async def insitu(backend: StandinBackend, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, [*words, "--url", backend.api_url])


async def test_a_run_is_shown_with_its_steps(backend: StandinBackend, client: InsituClient) -> None:
    told = await insitu(backend, "runs", "show", "run")
    assert told.exit_code == 0, told.output
    lines = told.stdout.splitlines()
    assert lines[0] == "run   ready, step 3; calls to run get run@3"
    assert "  base model   tiny, project default" in lines
    assert "  adapter      rank 8, alpha 16, seed 0, all linear layers" in lines
    assert "  starts from  the base model" in lines
    assert "  checkpoints  1 (pinned), 2, 3" in lines
    assert not any("error" in line for line in lines)
    head = [line.split() for line in lines].index(["step", "reward/mean", "reward/std"])
    assert [line.split()[:2] for line in lines[head + 1 :]] == [["1", "1"], ["2", "1"], ["3", "1"]]


async def test_the_object_has_the_documented_keys(backend: StandinBackend, client: InsituClient) -> None:
    shown = json.loads((await insitu(backend, "runs", "show", "run", "--json")).stdout)
    assert list(shown) == ["run", "served", "lineage", "steps", "checkpoints", "errors"]
    assert (shown["run"]["step"], shown["run"]["lora"]["rank"], shown["served"]) == (3, 8, "run@3")
    assert [step["step"] for step in shown["steps"]] == [1, 2, 3]
    assert shown["steps"][2]["metrics"]["loss/total"] == 1 / 3
    assert [(kept["step"], kept["pinned"]) for kept in shown["checkpoints"]] == [
        (1, True),
        (2, False),
        (3, False),
    ]
    assert (shown["lineage"], shown["errors"]) == ([], [])


async def test_lineage_goes_back_to_the_first_run(backend: StandinBackend, client: InsituClient) -> None:
    await client.register_run("child", "tiny", init_from="run@2")
    await client.wait_run_ready("child", 10, poll_seconds=0.02)
    await client.register_run("grandchild", "tiny", init_from="child@0")
    shown = json.loads((await insitu(backend, "runs", "show", "grandchild", "--json")).stdout)
    assert shown["lineage"] == ["child@0", "run@2"]
    told = await insitu(backend, "runs", "show", "grandchild")
    assert "  starts from  child@0 < run@2" in told.stdout.splitlines()


async def test_a_failed_run_says_why_and_is_not_served(backend: StandinBackend, client: InsituClient) -> None:
    backend.ledger.transition_run("run", RunState.FAILED, "the engine\x1b[2J died")
    told = (await insitu(backend, "runs", "show", "run")).stdout
    assert "run   failed, step 3; it is not served" in told
    assert "  error        the engine\\x1b[2J died" in told
    shown = json.loads((await insitu(backend, "runs", "show", "run", "--json")).stdout)
    assert (shown["served"], shown["errors"]) == (None, ["the engine\x1b[2J died"])


async def test_an_unknown_run_is_said(backend: StandinBackend) -> None:
    assert isinstance((await insitu(backend, "runs", "show", "ran")).exception, NotFound)
