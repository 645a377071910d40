"""Names of projects: translation loses nothing, and no two projects share a stored name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.access.projects import EVERYTHING, UNNAMED, Project, named_for, project_of
from insitu.errors import Forbidden, NotFound
from insitu.wire.bodies import RunBody
from insitu.wire.values import INIT_PATTERN, NAME_PATTERN, SEPARATOR, STORED_PATTERN

LETTERS = "abyz0189"
NAMES = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + "._-", max_size=63))
IDS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=80)
"""Ids of rollouts and calls from elsewhere: anything printable, the separator included."""
TEAM = Project("team-a")


@given(NAMES, IDS)
def test_a_stored_name_comes_back_as_it_was(project: str, name: str) -> None:
    stored = Project(project).stored(name)
    assert Project(project).shown(stored) == name
    assert Project(project).owns(stored)
    assert project_of(stored) == Project(project)
    assert EVERYTHING.stored(name) == EVERYTHING.shown(name) == name


@given(NAMES, NAMES, IDS, IDS)
def test_no_name_of_one_project_is_a_name_of_another(one: str, other: str, name: str, again: str) -> None:
    stored = Project(one).stored(name)
    if one != other:
        assert not Project(other).owns(stored)
        assert Project(other).stored(again) != stored
        assert Project(other).stored(stored) != stored


@given(NAMES, NAMES)
def test_stored_names_of_runs_are_valid_and_no_plain_name_is_one(project: str, run: str) -> None:
    stored = Project(project).stored(run)
    assert STORED_PATTERN.fullmatch(stored)
    assert STORED_PATTERN.fullmatch(run)
    assert not NAME_PATTERN.fullmatch(stored)
    assert INIT_PATTERN.fullmatch(f"{stored}@7")
    assert re.fullmatch(r"[A-Za-z0-9._~-]+", stored), "unreserved in URLs"
    assert not Project(project).owns(run), "runs of keys without a project"


@given(NAMES, NAMES, NAMES)
def test_messages_name_nothing_of_others(project: str, other: str, run: str) -> None:
    mine, its = Project(project).stored(run), Project(other).stored(run)
    said = Project(project).told(
        f"run {mine!r} waits for {its}@3 and {run} for {mine}@12: GET /v1/runs/{mine}."
    )
    if project != other:
        assert SEPARATOR not in said
        assert f"run {run!r} waits for a run of another project and {run} for {run}@12" in said
    assert EVERYTHING.told(its) == its


def test_a_reason_to_wait_names_only_own_runs() -> None:
    assert TEAM.reason("run team-a~adder trains step 3") == "run adder trains step 3"
    for other in ("run adder trains step 3", "run team-b~adder trains step 3", "team-b~x@2 is evaluated"):
        assert TEAM.reason(other) == "the engines are busy with a run of another project"
        assert EVERYTHING.reason(other) == other


def test_an_error_is_told_with_its_hint() -> None:
    error = TEAM.tell(NotFound("no run 'team-a~x'", hint="GET /v1/runs/team-a~x, not team-b~x"))
    assert (error.message, error.hint) == ("no run 'x'", "GET /v1/runs/x, not a run of another project")


def test_sources_and_teachers() -> None:
    digest = "sha256:" + "0" * 64
    assert TEAM.stored_source("adder@3") == "team-a~adder@3"
    assert TEAM.stored_source(digest) == "sha256:team-a~" + "0" * 64
    assert TEAM.told("sha256:team-a~" + "0" * 64) == digest
    assert TEAM.stored_source(None) is None
    assert TEAM.stored_teacher("adder@3") == "team-a~adder@3"
    assert TEAM.stored_teacher("big-model") == "big-model"
    assert TEAM.stored_teacher(None) is None
    assert EVERYTHING.stored_source(digest) == digest


def test_the_project_of_a_registration_is_that_of_the_key() -> None:
    for asked in (*UNNAMED, "team-a"):
        assert TEAM.registered(asked) == "team-a"
    with pytest.raises(Forbidden) as refused:
        TEAM.registered("team-b")
    assert "--project team-b" in refused.value.hint
    assert EVERYTHING.registered("team-b") == "team-b"
    assert RunBody(name="x", base_model="m").project in UNNAMED


def test_the_supervisor_names_runs_for_their_reader() -> None:
    assert named_for("team-a~x", "team-a~y@2") == "team-a~y@2"
    assert named_for("x", "team-a~y") == "team-a~y"
    for other in ("team-b~y", "y"):
        assert named_for("team-a~x", other) == "a run of another project"
