"""Every route of the API and of ART × scopes × projects: no project reads or changes anything of another.

`REQUESTS` is generated against the application's routes: a route that has no entry fails the first test.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from insitu.access import routes
from insitu.access.audit_log import AUDIT_FILE
from insitu.access.key_changes import create_key
from insitu.access.scopes import Scope
from insitu.backend.ledger import Ledger, adapter_files
from insitu.records.store import RecordStore
from insitu.types import (
    JobState,
    LoraSettings,
    ModelCall,
    RunState,
    StepSettings,
    Trajectory,
    TrajectoryGroup,
)
from insitu.wire.starts.adapter_upload import ADAPTER_TYPE
from tests.support.peft_directory import CONFIG, SHAPES, safetensors
from tests.support.scoped_keys import VALID

from .conftest import KEY, inline_call, ndjson
from .test_api_door import routes_of

HIDDEN = "hidden"
"""Part of everything that only the owner may read, and of no request."""
ADAPTER = json.dumps({"config": CONFIG}).encode() + b"\n" + safetensors(SHAPES)
DIGEST = hashlib.sha256(ADAPTER).hexdigest()
SPELLINGS = ("adder", "a~adder", "b~adder", "c~adder")
ASKED = {"role": "user", "content": "3 + 5?"}


@dataclass(frozen=True)
class Things:
    """What one owner has, by id."""

    job: str
    call: str


Request = tuple[str, dict[str, Any]]
Make = Callable[[str, Things], Iterator[Request]]


def at(path: str, **sent: Any) -> Make:
    def make(name: str, things: Things) -> Iterator[Request]:
        yield path.format(name=name, job=things.job), sent

    return make


def registrations(name: str, things: Things) -> Iterator[Request]:
    new = {"name": "new", "base_model": "model"}
    yield "/v1/runs", {"json": new | {"name": "adder"}}
    yield "/v1/runs", {"json": new | {"name": "adder", "project": "a"}}
    yield "/v1/runs", {"json": new | {"name": name}}
    yield "/v1/runs", {"json": new | {"init_from": f"{name}@1"}}
    yield "/v1/runs", {"json": new | {"fork_from": f"{name}@1"}}
    yield "/v1/runs", {"json": new | {"init_from": name}}
    yield "/v1/runs", {"json": new | {"init_from": f"sha256:{DIGEST}"}}


def uploads(name: str, things: Things) -> Iterator[Request]:
    group, headers = {"group": {"num_trajectories": 1}}, {"Content-Type": "application/x-ndjson"}
    bodies = []
    for rollout in ("r0", "a~r0"):
        head = {"rollout_id": rollout, "reward": 1.0}
        for call in (things.call, f"a~{things.call}", f"{things.call}-base", f"a~{things.call}-base"):
            bodies.append(ndjson(group, {"trajectory": head | {"call_ids": [call]}}))
        bodies.append(ndjson(group, {"trajectory": head | {"num_inline_calls": 1}}, inline_call()))
        inline = inline_call(rollout_id=rollout, run=name, id=things.call)
        bodies.append(ndjson(group, {"trajectory": head | {"num_inline_calls": 1}}, inline))
    for number, body in enumerate(bodies):
        yield f"/v1/runs/{name}/groups/n{number}", {"content": body, "headers": headers}
        yield f"/v1/runs/{name}/groups/g", {"content": body, "headers": headers}


def steps(name: str, things: Things) -> Iterator[Request]:
    for number, settings in enumerate(({}, {"method": "distill", "teacher": "a~adder@1"})):
        body = {"groups": ["free"], "settings": settings}
        yield f"/v1/runs/{name}/steps", {"json": body, "headers": {"Idempotency-Key": f"new{number}"}}
        yield f"/v1/runs/{name}/steps", {"json": body, "headers": {"Idempotency-Key": "first"}}


def rollbacks(name: str, things: Things) -> Iterator[Request]:
    for promotion in range(1, 5):
        yield f"/v1/runs/{name}/promotions/{promotion}/rollback", {}


def art(path: str, **more: Any) -> Make:
    def make(name: str, things: Things) -> Iterator[Request]:
        for project in ("a", "default"):
            model = {"name": name, "project": project, "base_model": "model"}
            yield path, {"json": {"model": model, **more} if more else model}

    return make


def _trained() -> dict[str, Any]:
    logprobs = {"content": [{"token": "t", "logprob": value} for value in (-0.5, -1.5)]}
    choice = {"index": 0, "logprobs": logprobs, "message": {"role": "assistant", "content": "8"}}
    return {"messages_and_choices": [ASKED, choice], "reward": 1.0}


REQUESTS: dict[str, Make] = {
    "GET /v1/fleet": at("/v1/fleet"),
    "GET /v1/runs": at("/v1/runs"),
    "POST /v1/runs": registrations,
    "GET /v1/runs/{name}": at("/v1/runs/{name}"),
    "PUT /v1/adapters/{sha256}": at(
        f"/v1/adapters/{DIGEST}", content=b"not the adapter", headers={"Content-Type": ADAPTER_TYPE}
    ),
    "GET /v1/runs/{name}/groups/{group_id}": at("/v1/runs/{name}/groups/g"),
    "PUT /v1/runs/{name}/groups/{group_id}": uploads,
    "GET /v1/runs/{name}/steps": at("/v1/runs/{name}/steps"),
    "POST /v1/runs/{name}/steps": steps,
    "GET /v1/jobs/{job_id}": at("/v1/jobs/{job}"),
    "GET /v1/jobs/{job_id}/events": at("/v1/jobs/{job}/events"),
    "POST /v1/jobs/{job_id}/cancel": at("/v1/jobs/{job}/cancel"),
    "GET /v1/runs/{name}/leases/{lease_id}": at("/v1/runs/{name}/leases/l"),
    "PUT /v1/runs/{name}/leases/{lease_id}": at("/v1/runs/{name}/leases/l", json={"step": 1, "seconds": 99}),
    "DELETE /v1/runs/{name}/leases/{lease_id}": at("/v1/runs/{name}/leases/l"),
    "GET /v1/runs/{name}/promotions": at("/v1/runs/{name}/promotions"),
    "PUT /v1/runs/{name}/promoted/{step}": at("/v1/runs/{name}/promoted/1"),
    "DELETE /v1/runs/{name}/promoted": at("/v1/runs/{name}/promoted"),
    "POST /v1/runs/{name}/promotions/{promotion_id}/rollback": rollbacks,
    "GET /v1/runs/{name}/checkpoints": at("/v1/runs/{name}/checkpoints"),
    "GET /v1/runs/{name}/checkpoints/{step}/files/{file}": at(
        "/v1/runs/{name}/checkpoints/1/files/manifest.json"
    ),
    "PUT /v1/runs/{name}/checkpoints/{step}/pin": at("/v1/runs/{name}/checkpoints/1/pin"),
    "DELETE /v1/runs/{name}/checkpoints/{step}/pin": at("/v1/runs/{name}/checkpoints/2/pin"),
    "DELETE /v1/runs/{name}/checkpoints/{step}": at("/v1/runs/{name}/checkpoints/1"),
    "POST /register": art("/register"),
    "POST /_get_step": art("/_get_step"),
    "POST /_prepare_backend_for_training": art("/_prepare_backend_for_training", config=None),
    "POST /_train_model": art(
        "/_train_model", trajectory_groups=[{"trajectories": [_trained()]}], wait=False
    ),
    "POST /_delete_checkpoint_files": art("/_delete_checkpoint_files", steps_to_keep=[]),
    "DELETE /v1/runs/{name}": at("/v1/runs/{name}"),
    "POST /v1/runs/{name}/alive": at("/v1/runs/{name}/alive"),
    "POST /v1/runs/{name}/release": at("/v1/runs/{name}/release"),
    "POST /v1/runs/{name}/close": at("/v1/runs/{name}/close"),  # last: the others need open runs
}
READ_BY_OWNER = [
    *("GET /v1/runs", "GET /v1/runs/{name}", "GET /v1/runs/{name}/groups/{group_id}"),
    *("GET /v1/runs/{name}/steps", "GET /v1/jobs/{job_id}", "GET /v1/jobs/{job_id}/events"),
    "GET /v1/runs/{name}/promotions",
    *("GET /v1/runs/{name}/checkpoints", "GET /v1/runs/{name}/checkpoints/{step}/files/{file}"),
]


def furnish(
    ledger: Ledger, records: RecordStore, state_dir: Path, run: str, rollout: str, call: str
) -> Things:
    """Give an owner one of everything, under stored names."""
    ledger.register_run("p", run, "model", LoraSettings(), {HIDDEN: 1}, {})
    ledger.transition_run(run, RunState.LOADING)
    ledger.transition_run(run, RunState.READY)
    answer = {"role": "assistant", "content": "8"}
    tokens: Any = ([1, 2, 3], [4, 5], [-0.5, -1.5], "stop")
    made = ModelCall(call, rollout, run, run, 3, "base", *tokens, messages=[ASKED], answer=answer)
    outside = replace(made, id=f"{call}-base", rollout_id=None, run=None)
    records.append([made, replace(made, id=f"{call}-free", rollout_id=None), outside])
    for group in ("g", "free", "g1", "g2", "g3"):
        ids = [call] if group == "g" else [f"inline:{run}:{group}:0:x"]
        named = rollout if group == "g" else f"{rollout}-{group}"
        trajectory = Trajectory(named, ids, 1.0, metadata={"note": HIDDEN})
        ledger.put_group(TrajectoryGroup(group, run, [trajectory]), group)
    for step in (1, 2, 3):
        job = ledger.create_job(run, f"step{step}", [f"g{step}"], StepSettings(), "h")
        ledger.transition_job(job.id, JobState.RUNNING)
        path = state_dir / "runs" / run / "checkpoints" / f"{step:06d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(HIDDEN)
        ledger.commit_step(job.id, step, {HIDDEN: 0.5}, str(path), HIDDEN)
    ledger.pin_checkpoint(run, 2)
    ledger.take_lease(run, "l", 3, 3000.0)
    for step in (3, 2):
        ledger.promote(run, step)
    open_job = ledger.create_job(run, "first", ["g"], StepSettings(), "h")
    ledger.transition_job(open_job.id, JobState.RUNNING)
    ledger.set_progress(open_job.id, f"{HIDDEN} phase", 0.5, {HIDDEN: 1})
    project = run.rpartition("~")[0]
    home = state_dir / "adapters" / (f"{project}~{DIGEST}" if project else DIGEST) / "adapter"
    home.mkdir(parents=True)
    (home.parent / adapter_files.CONFIG).write_text(json.dumps(CONFIG | {"target_modules": [HIDDEN]}))
    return Things(open_job.id, call.rpartition("~")[2])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is never served is waited for only briefly."""
    monkeypatch.setattr("insitu.backend.art.routes._READY_SECONDS", 0.0)


@pytest.fixture
def world(ledger: Ledger, records: RecordStore, tmp_path: Path) -> dict[str, Things]:
    """The same things in project `a` and without a project; project `b` has nothing."""
    return {
        "a": furnish(ledger, records, tmp_path, "a~adder", "a~r0", "a~mc-1"),
        "": furnish(ledger, records, tmp_path, "adder", "r0", "mc-2"),
    }


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7623", timeout=20) as opened:
        yield opened


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(client: httpx.AsyncClient, route: str, request: Request, key: str) -> httpx.Response:
    path, sent = request
    headers = sent.get("headers", {}) | bearer(key)
    return await client.request(route.partition(" ")[0], path, **{**sent, "headers": headers})


def content(state_dir: Path) -> dict[str, list[str]]:
    """Every row of ledger and records and every file that is not of project `b`, by table."""
    found: dict[str, list[str]] = {}
    jobs: set[str] = set()
    for file in ("ledger.db", "calls.db"):
        with sqlite3.connect(f"file:{state_dir / file}?mode=ro", uri=True) as database:
            listed = database.execute("select name from sqlite_master where type='table'")
            tables = [name for (name,) in listed.fetchall() if name != "sqlite_sequence"]  # of everybody
            if "jobs" in tables:
                jobs = {job for (job,) in database.execute("select id from jobs where run like 'b~%'")}
            for table in tables:
                rows = database.execute(f"select * from {table}")
                columns = [column[0] for column in rows.description]
                named = [dict(zip(columns, row, strict=True)) for row in rows.fetchall()]
                found[f"{file}/{table}"] = sorted(repr(row) for row in named if not _is_of_b(row, jobs))
        database.close()
    files = [path.relative_to(state_dir).as_posix() for path in state_dir.rglob("*")]
    found["files"] = sorted(f for f in files if f.startswith(("runs", "adapters")) and "b~" not in f)
    return found


def _is_of_b(row: dict[str, object], jobs: set[str]) -> bool:
    if not str(row.get("rollout_id") or "b~").startswith("b~"):
        return False  # whichever run it is in, the rollout is listed by this id
    return any(isinstance(value, str) and (value.startswith("b~") or value in jobs) for value in row.values())


def test_every_route_has_a_decision(app: FastAPI) -> None:
    every = {f"{method} {path}" for path, methods in routes_of(app).items() for method in methods - {"HEAD"}}
    decided = set(REQUESTS) | (routes.NOBODYS & set(routes.API))
    assert every == decided, "add the route to REQUESTS here; only routes without any object are NOBODYS"


@pytest.mark.timeout(280)
async def test_nothing_of_others_is_read_or_changed(
    app: FastAPI, client: httpx.AsyncClient, world: dict[str, Things], tmp_path: Path, ledger: Ledger
) -> None:
    services = app.state.services
    services.limits = replace(services.limits, record_lag_seconds=0.0)
    keys = {s: create_key(tmp_path, "-".join(sorted(s)), [*s], project="b")[0] for s in VALID}
    (tmp_path / "status.json").write_text('{"gateway_port": 8000}')
    before = content(tmp_path)
    for route in REQUESTS:
        for scopes, key in keys.items():
            for request in tried(route, world, whole=scopes == {Scope.ADMIN}):
                got = await ask(client, route, request, key)
                what = (route, request, sorted(scopes), got.status_code, got.text)
                lacks = got.status_code == 403 and "needs a key with the scope" in got.text
                assert lacks == (not {routes.API[route], Scope.ADMIN} & scopes), what
                assert got.status_code != 500, what
                assert HIDDEN not in got.text, what
                said = repr(request)
                assert all(word in said for word in re.findall(r"a~[a-z0-9.@-]*", got.text)), what
                assert got.text != "3", (what, "the step of others, to ART")
                assert "http://" not in got.text, (what, "where the run of others is served, to ART")
        after = content(tmp_path)
        for table in before:
            assert after[table] == before[table], (route, table)
    own = [run for run in ledger.list_runs() if run.name.startswith("b~")]
    assert {run.name for run in own} >= {"b~adder"}, "the requests were good ones"
    assert not [run for run in own if run.source is not None], "weights of others"
    calls = ledger.calls_in_use("b~adder", 0)
    assert calls, "inline ones"
    assert all(call.startswith(("b~", "inline:b~")) for call in calls)


def tried(route: str, world: dict[str, Things], *, whole: bool) -> Iterator[Request]:
    """Yield requests for the things of others: all, or one."""
    for owner in world.values():
        for name in SPELLINGS if whole else SPELLINGS[:1]:
            for request in REQUESTS[route](name, owner):
                yield request
                if not whole:
                    return


@pytest.mark.parametrize("route", [route for route in REQUESTS if "{job_id}" in route])
async def test_a_job_of_others_is_answered_as_one_that_does_not_exist(
    route: str, client: httpx.AsyncClient, world: dict[str, Things], tmp_path: Path
) -> None:
    key, _ = create_key(tmp_path, "b", [Scope.ADMIN], project="b")
    unknown = "job-" + "0" * 16
    for owner in world.values():
        texts: list[str] = []
        for things in (owner, Things(unknown, "")):
            (request,) = REQUESTS[route]("adder", things)
            got = await ask(client, route, request, key)
            assert got.status_code == 404
            texts.append(got.text.replace(things.job, unknown))
        assert texts[0] == texts[1]


async def test_the_owner_and_a_key_without_project_read_it(
    client: httpx.AsyncClient, world: dict[str, Things], tmp_path: Path, ledger: Ledger
) -> None:
    """The other side of the test above: what is hidden there is shown here, under the owner's names."""
    own, _ = create_key(tmp_path, "own", [Scope.SUBMIT], project="a")
    ledger.fail_job(world["a"].job, f"{HIDDEN}: run a~adder ended")
    for route in READ_BY_OWNER:
        (request,) = REQUESTS[route]("adder", world["a"])
        got = await ask(client, route, request, own)
        assert got.status_code == 200, got.text
        assert HIDDEN in got.text, route
        if "checkpoints" not in route:  # with their paths, which are what they are
            assert "a~" not in got.text, (route, got.text)
        (request,) = REQUESTS[route]("a~adder", world["a"])
        assert HIDDEN in (await ask(client, route, request, KEY)).text
    runs = (await client.get("/v1/runs", headers=bearer(KEY))).json()["runs"]
    assert [run["name"] for run in runs] == ["run", "a~adder", "adder"]
    runs = (await client.get("/v1/runs", headers=bearer(own))).json()["runs"]
    assert [run["name"] for run in runs] == ["adder"]


async def test_two_projects_use_the_same_names(
    client: httpx.AsyncClient, tmp_path: Path, ledger: Ledger
) -> None:
    keys = {p: create_key(tmp_path, f"key-{p}", [Scope.SUBMIT], project=p)[0] for p in ("a", "b")}
    headers = {"Content-Type": "application/x-ndjson"}
    jobs: dict[str, str] = {}
    for project, key in keys.items():
        asked = {"name": "adder", "base_model": f"model-{project}"}
        run = await client.post("/v1/runs", json=asked, headers=bearer(key))
        assert run.status_code == 200, run.text
        assert (run.json()["name"], run.json()["project"]) == ("adder", project)
        head = {"rollout_id": "r0", "reward": 1.0, "num_inline_calls": 1}
        inline = inline_call(run="adder", rollout_id="r0")
        body = ndjson({"group": {"num_trajectories": 1}}, {"trajectory": head}, inline)
        put = await client.put("/v1/runs/adder/groups/g", content=body, headers=headers | bearer(key))
        assert (put.status_code, put.json()["run"]) == (201, "adder"), put.text
        group = (await client.get("/v1/runs/adder/groups/g", headers=bearer(key))).json()
        assert group["trajectories"][0]["rollout_id"] == "r0"
        assert group["trajectories"][0]["call_ids"][0].startswith("inline:adder:g:0:")
        job = await client.post(
            "/v1/runs/adder/steps", json={"groups": ["g"]}, headers=bearer(key) | {"Idempotency-Key": "k"}
        )
        assert (job.status_code, job.json()["run"]) == (202, "adder"), job.text
        jobs[project] = job.json()["id"]
    assert jobs["a"] != jobs["b"]
    assert {run.name: run.base_model for run in ledger.list_runs() if run.name != "run"} == {
        "a~adder": "model-a",
        "b~adder": "model-b",
    }
    cancelled = await client.post(f"/v1/jobs/{jobs['a']}/cancel", headers=bearer(keys["a"]))
    assert cancelled.json()["run"] == "adder"
    assert ledger.get_job(jobs["b"]).state is JobState.QUEUED


async def test_sources_and_teachers_are_of_the_project(
    client: httpx.AsyncClient, world: dict[str, Things], tmp_path: Path, ledger: Ledger
) -> None:
    key, _ = create_key(tmp_path, "own", [Scope.SUBMIT], project="a")
    asked = {"base_model": "model"}
    for number, start in enumerate(
        ({"init_from": "adder@2"}, {"fork_from": "adder@3"}, {"init_from": f"sha256:{DIGEST}"})
    ):
        new = {"name": f"n{number}", **asked, **start}
        got = await client.post("/v1/runs", json=new, headers=bearer(key))
        assert got.status_code == 200, got.text
        (said,) = start.values()
        assert got.json()["source"] == said
    assert [ledger.get_run(f"a~n{number}").source for number in range(3)] == [
        "a~adder@2",
        "a~adder@3",
        f"sha256:a~{DIGEST}",
    ]
    body = {"groups": ["free"], "settings": {"method": "distill", "teacher": "adder@2"}}
    headers = bearer(key) | {"Idempotency-Key": "distilled"}
    job = await client.post("/v1/runs/adder/steps", json=body, headers=headers)
    assert (job.status_code, job.json()["settings"]["teacher"]) == (202, "adder@2"), job.text
    assert ledger.get_job(job.json()["id"]).settings.teacher == "a~adder@2"


async def test_an_adapter_is_uploaded_to_its_project(client: httpx.AsyncClient, tmp_path: Path) -> None:
    keys = [create_key(tmp_path, f"key-{p}", [Scope.SUBMIT], project=p)[0] for p in ("a", "b")]
    headers = {"Content-Type": ADAPTER_TYPE}
    for key, status in ((keys[0], 201), (keys[0], 200), (keys[1], 201), (KEY, 201)):
        got = await client.put(f"/v1/adapters/{DIGEST}", content=ADAPTER, headers=headers | bearer(key))
        assert (got.status_code, got.json()["init_from"]) == (status, f"sha256:{DIGEST}"), got.text
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == sorted(
        [DIGEST, f"a~{DIGEST}", f"b~{DIGEST}"]
    )


async def test_a_registration_for_another_project_is_refused_with_the_command(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    key, _ = create_key(tmp_path, "own", [Scope.SUBMIT], project="a")
    asked = {"name": "new", "base_model": "model", "project": "b"}
    for path in ("/v1/runs", "/register"):
        got = await client.post(path, json=asked, headers=bearer(key))
        assert got.status_code == 403
        assert "--project b" in got.json()["error"]["hint"]
    for project in ("default", "trainer_project", "a"):
        got = await client.post("/v1/runs", json=asked | {"project": project}, headers=bearer(key))
        assert (got.status_code, got.json()["project"]) == (200, "a")


async def test_only_keys_of_a_project_register_in_it(client: httpx.AsyncClient) -> None:
    got = await client.post("/v1/runs", json={"name": "a~new", "base_model": "m"}, headers=bearer(KEY))
    assert got.status_code == 400


async def test_errors_name_runs_as_their_reader_knows_them(
    client: httpx.AsyncClient, world: dict[str, Things], tmp_path: Path
) -> None:
    key, _ = create_key(tmp_path, "own", [Scope.ADMIN], project="a")
    got = await client.delete("/v1/runs/adder/checkpoints/2", headers=bearer(key))
    assert got.status_code == 409
    assert got.json()["error"] == {
        "type": "Conflict",
        "message": "checkpoint 2 of run 'adder' is pinned",
        "hint": "unpin it first: DELETE /v1/runs/adder/checkpoints/2/pin",
    }


async def test_every_change_is_noted_with_the_project(client: httpx.AsyncClient, tmp_path: Path) -> None:
    key, _ = create_key(tmp_path, "own", [Scope.ADMIN], project="a")
    expected: list[str] = []
    for route, make in REQUESTS.items():
        if not route.startswith("GET "):
            request = next(make("adder", Things("job-" + "0" * 16, "mc")))
            await ask(client, route, request, key)
            expected.append(f"{route.partition(' ')[0]} {request[0]}")
    await client.post("/v1/runs", json={}, headers=bearer(KEY))
    lines = [json.loads(line) for line in (tmp_path / AUDIT_FILE).read_text().splitlines()[1:]]
    *own, last = lines
    assert [(line["change"], line["key"], line["project"]) for line in own] == [
        (change, "own", "a") for change in expected
    ]
    assert "project" not in last


async def test_health_names_no_run_of_a_project(client: httpx.AsyncClient, tmp_path: Path) -> None:
    gateway = {"in_flight": {"a~adder@3": 1}, "in_flight_total": 1, "epoch": 1}
    status = {"state": "ready", "model": "m", "gateway": gateway, "waiting": "run a~adder cannot be read"}
    status["trainer"] = [{"rank": 0, "runs": {"a~adder": {"step": 3}}}]
    (tmp_path / "status.json").write_text(json.dumps(status))
    for path in ("/health", "/ready"):
        got = await client.get(path)
        assert "adder" not in got.text
        assert "run a run of a project cannot be read" in got.text
