"""A run keeps the precision in which it was trained, or the backend says that it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.plan.compute import Asked, Kept, choose
from insitu.backend.plan.cpu import CpuFacts
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.precision import kept_precision
from insitu.types import LoraSettings, RunState

FACTS = CpuFacts("x86_64", frozenset({"avx2"}), ((0,), (1,)))


@pytest.fixture
def ledger(tmp_path: Path):
    with Ledger(ledger_url(tmp_path)) as opened:
        yield opened


def add_run(
    ledger: Ledger, name: str, step: int, dtype: str | None, state: RunState = RunState.READY
) -> None:
    ledger.register_run("p", name, "m", LoraSettings(), {}, {})
    for next_state in (RunState.LOADING, RunState.READY):
        ledger.transition_run(name, next_state)
    if state is not RunState.READY:
        ledger.transition_run(name, state)
    with ledger._engine.execution_options(insitu_write=True).begin() as connection:
        connection.exec_driver_sql(f"UPDATE runs SET step = {step} WHERE name = '{name}'")
    if dtype is not None:
        ledger.set_precision(name, dtype)


def test_a_new_state_directory_keeps_nothing(tmp_path: Path) -> None:
    assert kept_precision(tmp_path) is None
    assert not (tmp_path / "ledger.db").exists()


def test_the_open_run_that_changed_last_decides(tmp_path: Path, ledger: Ledger) -> None:
    add_run(ledger, "older", 4, "float32")
    add_run(ledger, "newer", 2, "float16")
    add_run(ledger, "untrained", 0, "bfloat16")
    add_run(ledger, "unknown", 7, None)
    add_run(ledger, "closed", 9, "bfloat16", RunState.CLOSED)
    assert kept_precision(tmp_path) == Kept("newer", "float16")


def test_the_last_precision_counts(ledger: Ledger) -> None:
    add_run(ledger, "run", 1, "float32")
    ledger.set_precision("run", "float16")
    assert ledger.precisions() == {"run": "float16"}


@pytest.mark.parametrize(
    ("step", "before", "said"),
    [
        (3, "bfloat16", ["run run was trained in bfloat16 until step 3; it goes on in float32"]),
        (
            3,
            None,
            ["run run was trained in a precision that is not on record until step 3; it goes on in float32"],
        ),
        (3, "float32", []),
        (0, "bfloat16", []),
        (0, None, []),
    ],
)
def test_a_change_is_said(
    tmp_path: Path, ledger: Ledger, step: int, before: str | None, said: list[str]
) -> None:
    pytest.importorskip("ray", reason="the registrar starts engines, which are Ray actors")
    from insitu.backend.serving.registration import Registrar

    add_run(ledger, "run", step, before)
    heard: list[str] = []
    settings = ServeSettings(tmp_path, "cpu", choose(FACTS, "cpu", Asked()), "merged", "shared", "default")
    nothing: Any = type("Nothing", (), {})()
    registrar = Registrar(settings, ledger, nothing, nothing, tmp_path, heard.append)
    registrar._keep_precision(ledger.get_run("run"))
    assert heard == said
    assert ledger.precisions() == {"run": "float32"}
    registrar._keep_precision(replace(ledger.get_run("run"), step=9))
    assert heard == said, "said once"
