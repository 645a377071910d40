"""Every route of the gateway × scopes × projects: no project calls, reads or counts anything of another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from insitu.access import routes
from insitu.access.key_changes import create_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.projects import Project
from insitu.access.routes import PREFIXES
from insitu.access.scopes import Scope
from insitu.errors import NotFound
from insitu.gateway.engines import routes as routes_module
from insitu.gateway.engines.routes import parse_table
from insitu.gateway.engines.upstream import GENERATE_PATH
from tests.support.scoped_keys import VALID
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.unit.gateway.conftest import API, GatewayUnderTest, StartGateway
from tests.unit.gateway.test_scopes import bearer, routes_of

HIDDEN = "hidden"
"""Said in every call of the owners, and in no request of others."""
SERVED = {"0": {"engine_model": "tiny", "version": "base"}}
RUNS = {name: {"latest": 0, "served": SERVED} for name in ("adder", "a~adder", "a~only", "alone")}
MODELS = ("adder", "adder@0", "a~adder", "a~adder@0", "only", "alone", "b~adder")
CHAT = [{"role": "user", "content": "hi"}]
Body = dict[str, Any] | None
BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": CHAT},
    "POST /v1/completions": {"prompt": "hi"},
    "POST /v1/responses": {"input": "hi"},
    "POST /v1/messages": {"messages": CHAT, "max_tokens": 4},
    "POST /v1/messages/count_tokens": {"messages": CHAT},
    "POST /v1/demonstrations": {"messages": [*CHAT, {"role": "assistant", "content": "ho"}]},
}


def requests_of(route: str) -> Iterator[tuple[str, Body]]:
    """Yield the requests by which a key tries to reach the things of others: path and body."""
    method, _, template = route.partition(" ")
    rollouts = ("r0", "a~r0") if "{rollout_id}" in template else ("",)
    for rollout in rollouts:
        path = template.replace("{rollout_id}", rollout).replace("{function}", "f")
        plain = f"{method} /v1/{template.rpartition('/v1/')[2]}"
        for model in MODELS if plain in BODIES or "{model}" in path else MODELS[:1]:
            yield (
                path.replace("{model}", model),
                BODIES[plain] | {"model": model} if method == "POST" else None,
            )


async def ask(
    gateway: GatewayUnderTest, route: str, path: str, body: Body, key: str, **headers: str
) -> tuple[int, str]:
    data = None if body is None else orjson.dumps(body)
    async with gateway.session.request(
        route.partition(" ")[0], gateway.url + path, data=data, headers=bearer(key) | headers
    ) as got:
        return got.status, await got.text()


@pytest.fixture
async def gateway(start_gateway: StartGateway, tmp_path: Path) -> GatewayUnderTest:
    """Owners without a project and of project `a` have made the same calls; `b` has made none."""
    started = await start_gateway(
        keys_file=tmp_path / KEYS_FILE, make_engine=lambda: StandinEngine(Behaviour(texts=["x"]))
    )
    await started.put_table(runs=RUNS)
    return started


def key_of(directory: Path, project: str | None, *scopes: Scope) -> str:
    name = "-".join([project or "all", *sorted(scopes)])
    return create_key(directory, name, scopes or [Scope.INFER], project=project)[0]


async def make_calls(gateway: GatewayUnderTest, key: str) -> list[str]:
    """Make a call of each protocol in the rollout r0; return the answers."""
    answers: list[str] = []
    for route, body in BODIES.items():
        said = orjson.loads(orjson.dumps(body | {"model": "adder"}).replace(b'"hi"', f'"{HIDDEN}"'.encode()))
        status, text = await ask(gateway, route, "/rollouts/r0" + route.partition(" ")[2], said, key)
        assert status == 200, text
        assert "a~" not in text
        answers.append(text)
    return answers


def test_every_route_has_a_decision() -> None:
    every = {f"{method} {path}" for path, methods in routes_of().items() for method in methods - {"HEAD"}}
    calls = {route.replace(" ", f" {prefix}", 1) for route in BODIES for prefix in PREFIXES}
    models = {f"GET {prefix}/v1/models{one}" for prefix in PREFIXES for one in ("", "/{model}")}
    decided = calls | models | {"GET /rollouts/{rollout_id}/calls"}
    assert every == decided | (routes.NOBODYS & every), "say in BODIES how a new route is tried"


@pytest.mark.timeout(280)
async def test_nothing_of_others_is_read_or_changed(
    gateway: GatewayUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_module, "_ASKS_SECONDS", 0.0)  # nobody here brings idle runs back
    await make_calls(gateway, key_of(tmp_path, "a"))
    await make_calls(gateway, "default")
    before = [call.id for call in await gateway.records()]
    assert len([call_id for call_id in before if call_id.startswith("a~")]) == len(before) / 2 == 5
    keys = {scopes: key_of(tmp_path, "b", *scopes) for scopes in VALID}
    for route, need in routes.GATEWAY.items():
        if route in routes.NOBODYS:
            continue
        for scopes, key in keys.items():
            allowed = bool({need, Scope.ADMIN} & scopes)
            for path, body in requests_of(route):
                status, text = await ask(gateway, route, path, body, key)
                what = (route, path, body, sorted(scopes), status, text)
                assert HIDDEN not in text, what
                assert not allowed or status in (200, 400, 404), what
                if body is not None or "/v1/models/" in path:
                    odd_rollout = body is not None and "a~r0" in path
                    assert status == ((400 if odd_rollout else 404) if allowed else 403), what
                    assert not any(
                        f"{name}@0" in text.replace(path, "") for name in ("a~", "only", "alone")
                    ), what
                elif allowed and path.endswith("/v1/models"):
                    assert [card["id"] for card in orjson.loads(text)["data"]] == ["tiny"], what
                elif allowed and path.endswith("/calls") and "a~" not in path:
                    assert orjson.loads(text)["calls"] == [], what
                if {Scope.ADMIN} != scopes:
                    break  # one request shows the scope; the admin key tries them all
    assert [call.id for call in await gateway.records()] == before
    for key, prefix in ((key_of(tmp_path, "a", Scope.ADMIN), ""), ("default", ""), ("default", "a~")):
        status, text = await ask(gateway, "GET ", f"/rollouts/{prefix}r0/calls", None, key)
        assert (status, text.count(HIDDEN) > 0) == (200, True)
        counted = orjson.loads(text)
        assert (len(counted["calls"]), counted["seen"]) == (5, 5), "requests of others are not counted here"


async def test_an_owner_sees_plain_names_and_others_see_stored_ones(
    gateway: GatewayUnderTest, tmp_path: Path
) -> None:
    key = key_of(tmp_path, "a")
    status, text = await ask(gateway, "GET ", "/v1/models", None, key)
    names = [card["id"] for card in orjson.loads(text)["data"]]
    assert names == ["tiny", "adder", "only", "adder@0", "only@0"]
    body = BODIES["POST /v1/chat/completions"]
    for model in ("adder", "adder@0", "tiny"):
        async with gateway.session.post(
            f"{gateway.url}/v1/chat/completions",
            data=orjson.dumps(body | {"model": model}),
            headers=bearer(key) | {"x-insitu-rollout": "r0"},
        ) as got:
            answer, call_id = await got.json(), got.headers["x-insitu-call-id"]
        assert (got.status, answer["model"]) == (200, "tiny" if model == "tiny" else "adder@0")
        assert answer["id"] == call_id
    _, text = await ask(gateway, "GET ", "/rollouts/r0/calls", None, key)
    assert "a~" not in text
    listed = orjson.loads(text)["calls"]
    assert [(call["run"], call["rollout_id"]) for call in listed] == [("adder", "r0")] * 2 + [(None, "r0")]
    assert listed[-1]["id"] == call_id
    stored = await gateway.records()
    assert [(call.run, call.rollout_id) for call in stored] == [("a~adder", "a~r0")] * 2 + [(None, "a~r0")]
    assert stored[-1].id == f"a~{call_id}"
    _, text = await ask(gateway, "GET ", "/rollouts/a~r0/calls", None, "default")
    assert [call["id"] for call in orjson.loads(text)["calls"]] == [call.id for call in stored]
    status, _, _ = await gateway.post(headers=API, model="a~adder")
    assert status == 200


async def test_a_demonstration_is_recorded_in_the_project(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    key, route = key_of(tmp_path, "a"), "POST /v1/demonstrations"
    body = BODIES[route] | {"model": "adder"}
    status, text = await ask(gateway, route, "/rollouts/r0/v1/demonstrations", body, key)
    assert status == 200
    (call,) = orjson.loads(text)["calls"]
    (stored,) = await gateway.records()
    assert (stored.id, stored.rollout_id) == (f"a~{call['id']}", "a~r0")


async def test_the_prefix_cache_is_salted_with_the_project(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    body = BODIES["POST /v1/chat/completions"] | {"model": "tiny"}
    keys = [key_of(tmp_path, "a"), key_of(tmp_path, "b"), "default"]
    for key in keys:
        for path in ("/v1/chat/completions", "/rollouts/r0/v1/chat/completions"):
            for asked in (body, body | {"n": 2, "temperature": 1.0}):
                assert (await ask(gateway, "POST ", path, asked, key))[0] == 200
    salts = [sent.get("cache_salt") for sent in gateway.engine.calls_to(GENERATE_PATH)]
    assert salts == ["a"] * 6 + ["b"] * 6 + [None] * 6
    for key in keys:
        status, text = await ask(gateway, "POST ", "/v1/chat/completions", body | {"cache_salt": "a"}, key)
        assert status == 400, "no client chooses the salt"
        assert "cache_salt" in text


async def test_items_of_responses_are_of_the_project(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    keys = {project: key_of(tmp_path, project) for project in ("a", "b")} | {None: "default"}
    for owner, key in keys.items():
        _, text = await ask(gateway, "POST ", "/v1/responses", {"model": "tiny", "input": "hi"}, key)
        item = orjson.loads(text)["output"][0]["id"]
        again = {"model": "tiny", "input": [{"type": "item_reference", "id": item}, *CHAT]}
        for reader, other in keys.items():
            status, text = await ask(gateway, "POST ", "/v1/responses", again, other)
            assert status == (200 if reader == owner else 400), (owner, reader, text)


async def test_a_held_call_is_not_told_what_others_do(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    keys = {project: key_of(tmp_path, project) for project in ("a", "b")}
    hold = {"reason": "run a~adder trains step 3", "deadline_seconds": 0.0, "passing": None}
    await gateway.put_table(runs=RUNS, hold=hold)
    body = BODIES["POST /v1/chat/completions"]
    said = {
        project: (await ask(gateway, "POST ", "/v1/chat/completions", body | {"model": "tiny"}, key))[1]
        for project, key in keys.items()
    }
    assert "run adder trains step 3" in said["a"]
    assert "adder" not in said["b"]
    assert "a run of another project" in said["b"]
    # The one name that passes is a stored one: only the owner's calls go on.
    await gateway.put_table(runs=RUNS, hold=hold | {"passing": "a~adder@0"})
    statuses = [
        (await ask(gateway, "POST ", "/v1/chat/completions", body | {"model": "adder@0"}, key))[0]
        for key in (*keys.values(), "default")
    ]
    assert statuses == [200, 503, 503]


def test_a_base_model_that_is_not_served_names_no_run_of_others() -> None:
    base = {
        "name": "tiny",
        "engine_model": "tiny",
        "version": "base",
        "refusal": "one version, now a~adder@0",
    }
    sent = {"epoch": 1, "hold": None, "replicas": [], "base": base, "runs": RUNS}
    table = parse_table(orjson.dumps(sent))
    for project, named in (("a", True), ("b", False)):
        with pytest.raises(NotFound) as refused:
            table.resolve("tiny", Project(project))
        assert ("adder@0" in str(refused.value)) == named
        assert "a~" not in str(refused.value)
