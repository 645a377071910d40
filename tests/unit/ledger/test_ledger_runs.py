from __future__ import annotations

import itertools
from dataclasses import asdict

import pytest
import sqlalchemy as sa

from insitu.backend.ledger import Ledger, schema
from insitu.backend.ledger.transitions import RUN_TRANSITIONS
from insitu.errors import Conflict, NotFound
from insitu.types import LoraSettings, RunState, StepSettings


def test_registering_twice_gives_the_same_run(ledger: Ledger):
    first = ledger.get_run("run")
    again = ledger.register_run("project", "run", "model", LoraSettings(), {}, {})
    assert again == first
    assert ledger.list_runs() == [first]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_model": "other"}, "base_model is 'model', asked 'other'"),
        ({"lora": LoraSettings(rank=4)}, "'rank': 8"),
        ({"engine_args": {"max_model_len": 7}}, "engine_args is {}, asked {'max_model_len': 7}"),
        ({"init_args": {"x": None}}, "init_args"),
        ({"project": "p2"}, "project is 'project', asked 'p2'"),
    ],
)
def test_other_settings_are_a_conflict_that_says_the_difference(ledger: Ledger, change, said):
    settings = {"project": "project", "base_model": "model", "lora": LoraSettings()}
    settings |= {"engine_args": {}, "init_args": {}}
    with pytest.raises(Conflict) as caught:
        ledger.register_run(name="run", **(settings | change))
    assert said in caught.value.message


def test_every_run_transition_is_as_the_table_says(database_url: str):
    with Ledger(database_url) as ledger:
        for index, (current, wanted) in enumerate(itertools.product(RunState, RunState)):
            name = f"run-{index}"
            ledger.register_run("p", name, "m", LoraSettings(), {}, {})
            engine = ledger._engine  # the state is set behind the ledger's back
            with engine.execution_options(insitu_write=True).begin() as connection:
                connection.execute(
                    sa.update(schema.runs).where(schema.runs.c.name == name).values(state=current)
                )
            if wanted in RUN_TRANSITIONS[current]:
                assert ledger.transition_run(name, wanted, "why").state is wanted
            else:
                with pytest.raises(Conflict, match=f"is {current} and cannot become {wanted}"):
                    ledger.transition_run(name, wanted)


def test_a_failed_run_says_why_and_is_opened_again_by_registration(ledger: Ledger):
    ledger.transition_run("run", RunState.FAILED, "no such model")
    assert ledger.get_run("run").error == "no such model"
    again = ledger.register_run("project", "run", "model", LoraSettings(), {}, {})
    assert (again.state, again.error) == (RunState.REGISTERED, None)


def test_a_run_with_jobs_is_not_closed(ledger: Ledger, make_group):
    ledger.put_group(make_group("g"), "h")
    job = ledger.create_job("run", "k", ["g"], StepSettings(), "h")
    with pytest.raises(Conflict, match=job.id):
        ledger.transition_run("run", RunState.CLOSED)
    ledger.fail_job(job.id, "enough")
    assert ledger.transition_run("run", RunState.CLOSED).state is RunState.CLOSED


def test_unknown_runs_are_not_found(ledger: Ledger, make_group):
    for call in (
        lambda: ledger.get_run("nope"),
        lambda: ledger.transition_run("nope", RunState.LOADING),
        lambda: ledger.put_group(make_group("g", "nope"), "h"),
        lambda: ledger.create_job("nope", "k", ["g"], StepSettings(), "h"),
        lambda: ledger.checkpoints("nope"),
        lambda: ledger.steps("nope"),
    ):
        with pytest.raises(NotFound, match="nope"):
            call()


def test_a_run_of_an_earlier_release_is_registered_again_with_its_adapter(ledger: Ledger) -> None:
    """Its row has no `target_modules`, which is the same as none chosen."""
    before = LoraSettings()
    with ledger._engine.begin() as connection:
        stored = {name: value for name, value in asdict(before).items() if name != "target_modules"}
        connection.execute(sa.update(schema.runs).values(lora=stored))
    assert ledger.register_run("project", "run", "model", before, {}, {}).lora == before
    with pytest.raises(Conflict, match="q_proj"):
        ledger.register_run("project", "run", "model", LoraSettings(target_modules=["q_proj"]), {}, {})
