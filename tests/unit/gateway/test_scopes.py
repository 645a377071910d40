"""Every route of the gateway × every method × every kind of key."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp

from insitu.access import routes
from insitu.access.key_changes import create_key, revoke_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.routes import Access
from insitu.access.scopes import Scope
from insitu.gateway.app import build_app
from insitu.gateway.process import settings_from
from insitu.gateway.shared.settings import Settings
from tests.support.scoped_keys import VALID, check_answer, ended_keys, needs, valid_keys
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.unit.gateway.conftest import ADMIN, API, GatewayUnderTest, StartGateway, until
from tests.unit.gateway.test_process import answers, free_port, start

NAMED = {"rollout_id": "r", "function": "f", "model": "tiny", "engine": "replica-0"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def routes_of() -> dict[str, set[str]]:
    """The application's own routes: methods by path."""
    found: dict[str, set[str]] = {}
    for route in build_app(Settings("sqlite://", "default", "admin")).router.routes():
        assert route.resource is not None
        found.setdefault(route.resource.canonical, set()).add(route.method)
    return found


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(gateway: GatewayUnderTest, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    async with gateway.session.request(method, gateway.url + path, headers=headers) as got:
        return got.status, await got.text()


def test_the_table_has_exactly_the_routes() -> None:
    every = {f"{method} {path}" for path, methods in routes_of().items() for method in methods - {"HEAD"}}
    assert set(routes.GATEWAY) == every


async def test_every_route_method_and_scope(start_gateway: StartGateway, tmp_path: Path) -> None:
    keys = valid_keys(tmp_path)
    gateway = await start_gateway(keys_file=tmp_path / KEYS_FILE)
    checked = 0
    for template, methods in routes_of().items():
        path = template.format(**NAMED)
        for method in METHODS:
            for scopes in VALID:
                status, body = await ask(gateway, method, path, bearer(keys[scopes]))
                what = (method, path, scopes)
                if method not in methods:
                    assert status == 405, what
                    continue
                need = needs(dict(routes.GATEWAY), f"{method.replace('HEAD', 'GET')} {template}")
                if need is Access.SUPERVISOR:
                    assert status == 401, what
                elif method == "HEAD":
                    allowed = not isinstance(need, Scope) or bool({need, Scope.ADMIN} & scopes)
                    assert (status != 403) == allowed, what
                else:
                    check_answer(need, scopes, status, body, what)
                checked += 1
    assert checked >= len(routes.GATEWAY) * len(VALID)


async def test_the_other_keys_open_what_they_always_did(start_gateway: StartGateway, tmp_path: Path) -> None:
    create_key(tmp_path, "a", [Scope.SUBMIT])
    gateway = await start_gateway(keys_file=tmp_path / KEYS_FILE)
    for template, methods in routes_of().items():
        need = routes.GATEWAY[f"{min(methods - {'HEAD'})} {template}"]
        for method in methods:
            status, body = await ask(
                gateway, method, template.format(**NAMED), ADMIN if need is Access.SUPERVISOR else API
            )
            assert status not in (401, 403, 405, 500), (method, template, body)


async def test_ended_keys_open_nothing_and_say_why(start_gateway: StartGateway, tmp_path: Path) -> None:
    ended = ended_keys(tmp_path)
    gateway = await start_gateway(keys_file=tmp_path / KEYS_FILE)
    for how, key in ended.items():
        for template, methods in routes_of().items():
            for method in methods - {"HEAD"}:
                for headers in (bearer(key), {"x-api-key": key}):
                    status, body = await ask(gateway, method, template.format(**NAMED), headers)
                    if template in ("/health", "/ready"):
                        assert status == 200
                        continue
                    assert status == 401, (method, template)
                    if not template.startswith("/control"):
                        assert how in body, (method, template, body)
                        assert "gone" not in body
                        assert "short" not in body


async def test_a_call_with_a_scoped_key_is_answered(start_gateway: StartGateway, tmp_path: Path) -> None:
    infer, _ = create_key(tmp_path, "a", [Scope.INFER])
    submit, _ = create_key(tmp_path, "b", [Scope.SUBMIT])
    gateway = await start_gateway(keys_file=tmp_path / KEYS_FILE)
    for prefix in ("", "/rollouts/r1", "/rollouts/r1/functions/f"):
        path = f"{prefix}/v1/chat/completions"
        assert (await gateway.post(path, headers=bearer(infer)))[0] == 200
        status, body, _ = await gateway.post(path, headers=bearer(submit))
        assert (status, body["error"]["type"]) == (403, "Forbidden")
    status, body = await ask(gateway, "POST", "/v1/messages", {"x-api-key": submit})
    assert status == 403
    assert "permission_error" in body  # in the shape of the protocol
    # A request that was turned away at the door is not a call of the rollout.
    status, body = await ask(gateway, "GET", "/rollouts/r1/calls", bearer(infer))
    assert status == 200
    assert '"seen":2' in body.replace(" ", "")


def test_the_file_is_named_on_the_command_line(tmp_path: Path) -> None:
    managed = ["--records", "sqlite://", "--managed"]
    assert settings_from(managed).keys_file is None
    assert settings_from([*managed, "--keys", str(tmp_path / KEYS_FILE)]).keys_file == tmp_path / KEYS_FILE


async def test_a_running_gateway_sees_changes_within_five_seconds(tmp_path: Path) -> None:
    port, records = free_port(), f"sqlite:///{tmp_path}/calls.db"
    url = f"http://127.0.0.1:{port}"

    async with StandinEngine(Behaviour()) as engine, aiohttp.ClientSession() as session:
        child = await start(
            *("--port", str(port), "--records", records, "--upstream", engine.url),
            *("--keys", str(tmp_path / KEYS_FILE)),
        )

        async def answer_is(key: str, status: int) -> bool:
            async with session.get(f"{url}/v1/models", headers=bearer(key)) as got:
                return got.status == status

        try:
            await until(lambda: answers(session, url), "the gateway answers", 30)
            assert await answer_is("default", 200)
            key, _ = create_key(tmp_path, "a", [Scope.INFER])
            await until(lambda: answer_is(key, 200), "the new key is accepted", 5)
            revoke_key(tmp_path, "a")
            await until(lambda: answer_is(key, 401), "the revoked key is rejected", 5)
            assert await answer_is("default", 200)
        finally:
            child.send_signal(signal.SIGTERM)
            _, said = await asyncio.wait_for(child.communicate(), 30)
        assert key.encode() not in said
