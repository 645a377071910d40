"""No request that the gateway's own description leads to, valid or not, is answered with a 5xx."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
import schemathesis
from aiohttp import web

from insitu.gateway.app import Gateway
from insitu.gateway.description import describe
from insitu.gateway.protocols.chat import ChatProtocol
from insitu.gateway.protocols.completions import CompletionsProtocol
from insitu.gateway.protocols.messages import MessagesProtocol
from insitu.gateway.protocols.responses import ResponsesProtocol
from insitu.gateway.shared.settings import Settings
from tests.support.any_request import IS_LONG, LIMIT_SECONDS, ask_each
from tests.unit.gateway.conftest import API, GatewayUnderTest

pytestmark = pytest.mark.timeout(LIMIT_SECONDS)
PROTOCOLS = {
    "chat/completions": ChatProtocol(),
    "completions": CompletionsProtocol(),
    "responses": ResponsesProtocol(),
    "messages": MessagesProtocol(),
}


async def test_no_request_is_answered_with_a_server_error(gateway: GatewayUnderTest) -> None:
    async with gateway.session.get(f"{gateway.url}/v1/openapi.json", headers=API) as answer:
        document = await answer.json()
    assert document == describe(PROTOCOLS)
    seen = await asyncio.to_thread(ask_each, operations(document, gateway.url), API, naming_a_model)
    assert {200, 400, 404} <= {status for _, status in seen}, "good and odd requests were among them"


def operations(document: dict[str, Any], url: str) -> list[Any]:
    schema: Any = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    found: list[Any] = [operation.ok() for operation in schema.get_all_operations()]
    # Behind a prefix, the same handlers answer.
    return [operation for operation in found if IS_LONG or not operation.path.startswith("/rollouts/{")]


def naming_a_model(case: Any) -> Any:
    """Ask for the model that is served: another one is a 404, whatever else the request says."""
    if isinstance(case.body, dict):
        case.body["model"] = "tiny"
    return case


def test_the_description_has_every_route_and_no_other() -> None:
    app: web.Application = Gateway(Settings("sqlite://", "default")).app
    served = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {
        (method.upper(), path) for path, item in describe(PROTOCOLS)["paths"].items() for method in item
    }
    supervisors = {("GET", "/control/state"), ("PUT", "/control/routes")}
    assert described == served - supervisors


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=lambda protocol: protocol.name)
def test_the_description_names_every_field_that_a_protocol_takes(protocol: Any) -> None:
    schema = describe(PROTOCOLS)["components"]["schemas"][protocol.name]
    assert schema["properties"].keys() == protocol.fields


async def test_the_description_needs_a_key(gateway: GatewayUnderTest) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{gateway.url}/v1/openapi.json") as answer,
    ):
        assert answer.status == 401
