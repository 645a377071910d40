"""Every route and every admin request has a message of `wire/`, defined once."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from aiohttp import web
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

import insitu.wire
from insitu import client, gateway_client, web_pages
from insitu.backend.api.settings import ApiSettings
from insitu.backend.fleet.replica import EngineClient
from insitu.backend.http.app import build_api
from insitu.backend.serving.traffic import Traffic
from insitu.gateway.app import build_app
from insitu.gateway.recording.listings import Listings
from insitu.gateway.shared.settings import Settings
from insitu.wire import (
    answers,
    art,
    bodies,
    engine,
    gateway_state,
    group_upload,
    listed_calls,
    routing_table,
)
from insitu.wire.message import Message
from insitu.wire.starts import adapter_upload

KEY = "k" * 32

STREAMED = {
    "PUT /v1/runs/{name}/groups/{group_id}": (
        group_upload.GroupLine,
        "NDJSON, read line by line as it arrives",
    ),
    "PUT /v1/adapters/{sha256}": (adapter_upload.AdapterHead, "its first line; the rest is safetensors"),
}
"""Bodies that FastAPI does not read, with the message that they consist of."""
NOT_A_MODEL = {
    "GET /v1/jobs/{job_id}/events": "server-sent events, each an EventInfo",
    "GET /v1/runs/{name}/checkpoints/{step}/files/{file}": "the bytes of a file",
    "GET /v1/openapi.json": "the description of the routes",
    "GET /metrics": "the text format of Prometheus",
    **{f"GET /{name}": "a file of the web pages" for name in ("", *web_pages.FILES)},
    "POST /logout": "204",
    "POST /_get_step": "ART's protocol: a bare number",
    "POST /_prepare_backend_for_training": "ART's protocol: a pair",
    "POST /_train_model": "ART's protocol: metrics line by line; without `wait` a TrainReceipt",
}
"""Answers that are no single JSON object."""
ENGINES_OWN = "GET /engines/{engine}/metrics"
"""vLLM's text for Prometheus, of the gateway alone."""
NO_BODY = {"POST /logout": "the cookie says which session"}
"""Requests that are read but for their body."""
PROTOCOLS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
"""Routes of the gateway whose bodies and answers are those of OpenAI's and Anthropic's protocols."""
READ_BY_HAND = {
    "PUT /control/routes": routing_table.RoutingTable,
    "GET /rollouts/{rollout_id}/calls": listed_calls.RolloutRecord,
    **{
        f"POST {prefix}/v1/demonstrations": bodies.Demonstration
        for prefix in ("", "/rollouts/{rollout_id}", "/rollouts/{rollout_id}/functions/{function}")
    },
}
"""Messages of the gateway's own routes that are not in a handler's signature; checked below."""


def is_message(kind: Any) -> bool:
    return (
        inspect.isclass(kind)
        and kind.__module__.startswith("insitu.wire.")
        and issubclass(kind, Message | art.Lenient)
    )


@pytest.fixture
def api(tmp_path: Path) -> FastAPI:
    return build_api(ApiSettings.with_key(tmp_path, KEY))


@pytest.fixture
def gateway(tmp_path: Path) -> web.Application:
    return build_app(Settings(f"sqlite:///{tmp_path}/calls.db", KEY, KEY))


def routes_of(app: FastAPI) -> dict[str, Any]:
    return {
        f"{method} {route.path}": route  # type: ignore[attr-defined]
        for route in app.routes
        for method in sorted(route.methods - {"HEAD"})  # type: ignore[attr-defined]
    }


def test_every_route_of_the_api_has_messages(api: FastAPI) -> None:
    routes = routes_of(api)
    assert len(routes) > 15
    for name, route in routes.items():
        if name == "GET /v1/openapi.json":
            continue
        assert isinstance(route, APIRoute), name
        hints = get_type_hints(route.endpoint)
        if route.body_field is not None:
            assert is_message(route.body_field.field_info.annotation), f"{name} reads no message of wire/"
        elif route.methods & {"POST", "PUT", "PATCH"} and "request" in hints and name not in NO_BODY:
            assert is_message(STREAMED[name][0]), name
        if name in NOT_A_MODEL:
            assert not is_message(hints["return"]), f"{name} has a model: take it off the list"
            continue
        assert is_message(hints["return"]), f"{name} answers with no message of wire/: {hints['return']}"
    assert set(NOT_A_MODEL) <= set(routes), "the list names routes that are gone"
    assert set(STREAMED) <= set(routes)


def own_routes(app: web.Application) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for route in app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        if route.method != "HEAD" and path.rpartition("/v1/")[2] not in PROTOCOLS:
            own[f"{route.method} {path}"] = route.handler
    return own


def test_every_own_route_of_the_gateway_has_messages(gateway: web.Application) -> None:
    own = own_routes(gateway)
    assert {"GET /health", "GET /ready", "GET /control/state", "GET /v1/models"} <= set(own)
    for name, handler in own.items():
        if name in NOT_A_MODEL or name == ENGINES_OWN:
            continue
        if name.startswith(("PUT", "POST")):
            assert is_message(READ_BY_HAND[name]), f"{name} reads no message of wire/"
        answer = get_type_hints(handler)["return"]
        if answer is web.Response:
            assert is_message(READ_BY_HAND[name]), f"{name} answers with no message of wire/"
        else:
            assert is_message(answer), f"{name} answers with no message of wire/: {answer}"
    assert set(READ_BY_HAND) <= set(own)
    counted = get_type_hints(Listings._counts)["return"]  # pyright: ignore[reportPrivateUsage]
    assert counted is listed_calls.RolloutRecord


def transported(module: Any) -> set[str]:
    """The names of the messages in the signatures of a module's client."""
    (kind,) = [value for name, value in vars(module).items() if name in ("InsituClient", "GatewayClient")]
    hints = [get_type_hints(method) for _, method in inspect.getmembers(kind, inspect.isfunction)]
    return {value.__name__ for each in hints for value in each.values() if is_message(value)}


def test_clients_return_what_the_servers_send() -> None:
    assert transported(client) >= {
        "Health",
        "RunInfo",
        "GroupReceipt",
        "GroupInfo",
        "JobInfo",
        "CheckpointInfo",
    }
    assert transported(gateway_client) == {
        *("GatewayHealth", "RolloutRecord", "Demonstration", "DemonstrationReceipt"),
        *("ContinuedIds", "Continued"),
    }


def test_control_and_admin_requests_are_messages() -> None:
    hints = get_type_hints(Traffic._table)  # pyright: ignore[reportPrivateUsage]
    assert hints["return"] is routing_table.RoutingTable
    assert get_type_hints(Traffic.refresh)["return"] == gateway_state.GatewayState | None
    posted = inspect.signature(EngineClient._post).parameters["body"].annotation  # pyright: ignore[reportPrivateUsage]
    assert posted == "Message | None", "an engine is sent messages only"
    source = inspect.getsource(importlib.import_module("insitu.backend.fleet.replica"))
    built = set(re.findall(r"\b(\w+)\(", source))
    assert {name for name in built if is_message(getattr(engine, name, None))} == {
        "AdapterDirectory",
        "Completion",
        "FindLeftOut",
        "LoadAdapter",
        "NewVersion",
        "ReloadWeights",
        "UnloadAdapter",
        "WeightsPath",
    }


def test_no_request_is_built_from_a_bare_dict() -> None:
    root = Path(insitu.wire.__file__).parents[1]
    for path in ("client.py", "gateway_client.py", "compat/art.py", "backend/serving/traffic.py"):
        assert "json=" not in (root / path).read_text(), path


def messages() -> list[type[Any]]:
    found: list[type[Any]] = []
    for info in pkgutil.walk_packages(insitu.wire.__path__, "insitu.wire."):
        module = importlib.import_module(info.name)
        found += [
            kind
            for kind in vars(module).values()
            if is_message(kind) and kind.__module__ == module.__name__ and not kind.__name__.startswith("_")
        ]
    return found


def test_every_message_is_frozen_and_defined_once() -> None:
    names = [kind.__name__ for kind in messages() if kind.__name__ not in ("Message", "Answer")]
    assert len(names) > 30
    assert len(names) == len(set(names))
    for kind in messages():
        if dataclasses.is_dataclass(kind):
            assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]
        elif issubclass(kind, BaseModel):
            assert kind.model_config.get("frozen"), kind
    root = Path(insitu.wire.__file__).parents[1]
    for path in [p for place in ENDS for p in sorted(root.glob(place))]:
        text = path.read_text()
        again = [name for name in names if f"\nclass {name}(" in text or f"\nclass {name}:" in text]
        assert not again, f"{path} defines {again} again"
        assert "BaseModel" not in text, f"{path} defines a message outside wire/"


ENDS = (
    "*client.py",
    "types.py",
    "compat/art.py",
    "backend/api/*.py",
    "backend/http/*.py",
    "backend/adapters/*.py",
    "backend/art/*.py",
    "backend/serving/traffic.py",
    "backend/fleet/replica*.py",
    "gateway/*.py",
    "gateway/recording/*.py",
)
"""The modules at the two ends of a wire."""


def test_errors_have_one_shape() -> None:
    assert get_type_hints(answers.error_body)["return"] is answers.ErrorBody
    assert not is_message(Response)
