"""`insitu runs` against a real server: list, close, and errors without a traceback."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner, Result

from insitu.backend.ledger import Ledger
from insitu.cli import cli
from insitu.errors import NotFound, Unauthorized
from insitu.types import LoraSettings, RunState

from .conftest import KEY


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_API_KEY", KEY)


async def insitu(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, ["runs", *words])


async def test_runs_are_listed_for_people_and_programs(server: str) -> None:
    told = await insitu("list", "--url", server)
    assert (told.exit_code, told.stdout) == (0, "run   registered, step 0, model, project\n")
    (found,) = json.loads((await insitu("list", "--json", "--url", server)).stdout)
    assert (found["name"], found["state"], found["step"]) == ("run", "registered", 0)


async def test_a_closed_run_makes_room_and_can_be_opened_again(server: str, ledger: Ledger) -> None:
    told = await insitu("close", "run", "--url", server)
    assert told.stdout == "run is closed at step 0; its checkpoints are kept\n"
    assert ledger.get_run("run").state is RunState.CLOSED
    again = ledger.register_run("project", "run", "model", LoraSettings(), {}, {"max_seq_length": 100})
    assert again.state is RunState.REGISTERED


async def test_an_unknown_run_and_a_wrong_key_are_said(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance((await insitu("close", "ran", "--url", server)).exception, NotFound)
    monkeypatch.setenv("INSITU_API_KEY", "another")
    assert isinstance((await insitu("list", "--url", server)).exception, Unauthorized)
