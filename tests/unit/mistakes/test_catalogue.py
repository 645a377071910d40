"""A catalogue of mistakes that a user of the first hour makes: each is answered with its cause, the value
and the next thing to do, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from insitu.errors import InsituError
from tests.unit.mistakes import (
    agent_entry,
    backend,
    command_line,
    configuration,
    data,
    environment,
    resuming,
    reward,
)
from tests.unit.mistakes.desk import DRY_RUN, Desk, Mistake
from tests.unit.mistakes.two_doors import TwoDoors, two_doors

AREAS: tuple[ModuleType, ...] = (
    configuration,
    data,
    reward,
    agent_entry,
    backend,
    command_line,
    environment,
    resuming,
)
CATALOGUE: dict[str, Mistake] = {
    f"{area.__name__.rpartition('.')[2]}: {mistake.name}": mistake
    for area in AREAS
    for mistake in area.MISTAKES
}


@pytest.fixture(scope="module")
def doors() -> Iterator[TwoDoors]:
    with two_doors() as open_ones:
        yield open_ones


@pytest.fixture
def desk(tmp_path: Path, doors: TwoDoors, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr("insitu.wire.transport.RetryPolicy.pause", lambda *_: 0.0)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("INSITU_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("agent", "reward"):  # of another test's project
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    desk = Desk(tmp_path, doors, monkeypatch)
    desk.lay_out()
    yield desk
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_mistake_is_answered(desk: Desk, name: str) -> None:
    mistake = CATALOGUE[name]
    try:
        code, said = mistake.provoke(desk)
    except InsituError as error:  # from the functions below the command, which prints it
        code, said = 1, f"error: {error}"
    assert code != 0, said
    assert "Traceback" not in said
    for part in (mistake.cause, mistake.value, mistake.next_step):
        assert part
        assert part in said, said


def test_without_a_mistake_the_dry_run_passes(desk: Desk) -> None:
    code, said = desk.run(*DRY_RUN)
    assert code == 0, said


def test_the_catalogue_is_large_and_every_mistake_is_its_own() -> None:
    assert len(CATALOGUE) >= 60
    provoked = [mistake.provoke for mistake in CATALOGUE.values()]
    assert len(set(map(id, provoked))) == len(provoked)
