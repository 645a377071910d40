"""The table of routes: rules that it must keep, whatever it lists, and the page that prints it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import orjson
import pytest

from insitu.access.routes import API, GATEWAY, NOBODYS, PREFIXES, Access, Table, need_of
from insitu.access.scopes import Scope
from insitu.web_pages import FILES
from tests.support.standin_backend import KEY, StandinBackend

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "keys.md"


def printed(heading: str) -> dict[str, str]:
    """The rows of the table under a heading of the page."""
    part = PAGE.read_text().partition(f"### {heading}\n")[2].partition("\n##")[0]
    return dict(re.findall(r"^\| `([A-Z]+ /[^`]*)` \| `?([^`|]+?)`? \|$", part, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "table"), [("Routes of the API", API), ("Routes of the gateway", GATEWAY)]
)
def test_the_page_prints_the_table(heading: str, table: Table) -> None:
    unprefixed = {
        route: str(need)
        for route, need in table.items()
        if not any(f" {prefix}/v1" in route for prefix in PREFIXES[1:])
    }
    assert printed(heading) == unprefixed


def test_a_prefix_changes_nothing() -> None:
    for route, need in GATEWAY.items():
        method, _, path = route.partition(" ")
        for prefix in PREFIXES[1:]:
            if path.startswith("/v1/") and path != "/v1/openapi.json":
                assert GATEWAY[f"{method} {prefix}{path}"] is need


def test_only_health_readiness_and_the_files_of_the_pages_are_open() -> None:
    opened = {
        table: [route for route, need in routes.items() if need is Access.OPEN]
        for table, routes in (("api", API), ("gateway", GATEWAY))
    }
    files = ["GET /", *(f"GET /{name}" for name in FILES)]
    assert opened == {
        "api": [*files, "GET /health", "GET /ready"],
        "gateway": ["GET /health", "GET /ready"],
    }
    assert [route for route, need in (API | GATEWAY).items() if need is Access.LOGIN] == ["POST /login"]


def test_routes_without_anything_of_a_project_name_nothing() -> None:
    assert set(API) | set(GATEWAY) >= NOBODYS
    assert not any("{" in route.replace("{engine}", "") or route.startswith("DELETE ") for route in NOBODYS)


def test_deletions_and_promotions_need_admin() -> None:
    for route, need in API.items():
        deletes = route.endswith("_delete_checkpoint_files") or (
            route.startswith("DELETE ") and "/leases/" not in route and not route.endswith("/pin")
        )
        promotes = "/promoted" in route or route.endswith("/rollback")
        assert (need is Scope.ADMIN) == (deletes or promotes), route


def test_infer_is_for_the_gateway_and_submit_for_the_api() -> None:
    assert Scope.INFER not in API.values()
    assert {Scope.SUBMIT, Scope.ADMIN}.isdisjoint(GATEWAY.values())
    assert all((need is Access.SUPERVISOR) == ("/control/" in route) for route, need in GATEWAY.items())


def test_an_unknown_route_needs_admin_without_project_and_head_needs_what_get_needs() -> None:
    assert need_of(API, "POST", "/v1/new") is Access.WHOLE
    assert need_of(API, "PUT", "/health") is Access.WHOLE
    assert need_of(API, "HEAD", "/v1/openapi.json") is Access.ANY_KEY
    assert need_of(GATEWAY, "HEAD", "/v1/models") is Scope.INFER


async def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    """Run the page's shell blocks in order, against a running API and gateway."""
    program = tmp_path / "bin" / "insitu"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m insitu.cli "$@"\n')
    program.chmod(0o755)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    async with StandinBackend(tmp_path / "state") as backend:
        addresses = {"URL": f"http://127.0.0.1:{backend.port}", "GATEWAY": backend.gateway_url}
        state = {
            "INSITU_STATE_DIR": str(tmp_path / "state"),
            "INSITU_API_KEY": KEY,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
        }
        shell = await asyncio.create_subprocess_exec(
            *("sh", "-eu", "-c", "\n".join(blocks)),
            env={**os.environ, **addresses, **state},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, problems = await asyncio.wait_for(shell.communicate(), 120)
    assert shell.returncode == 0, problems
    lines = said.decode().splitlines()
    rows = [line.split()[:3] for line in lines if " active " in line]
    assert rows == [["agent", "infer", "active"], ["nightly", "submit", "active"]]
    models, runs, forbidden, *of_teams = (orjson.loads(line) for line in lines if line.startswith("{"))
    assert models["data"][0]["id"] == "tiny"
    assert runs == {"runs": []}
    shown = "".join(line[2:].strip() for line in blocks[1].splitlines() if line.startswith("# "))
    assert orjson.loads(shown) == forbidden
    assert any(line.startswith("agent was revoked at ") for line in lines)
    made_a, made_b, listed_b, listed = of_teams
    assert [(run["name"], run["project"]) for run in (made_a, made_b)] == [
        ("adder", "team-a"),
        ("adder", "team-b"),
    ]
    assert [run["name"] for run in listed_b["runs"]] == ["adder"]
    assert [run["name"] for run in listed["runs"]] == ["team-a~adder", "team-b~adder"]
