"""The supervisor writes and the gateway reads one definition of the routing table."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.gateway.engines.routes import Target, parse_table
from insitu.wire.routing_table import Hold, ReplicaAddress, RoutingTable, Served, ServedBase, ServedRun

TABLE = RoutingTable(
    epoch=7,
    hold=Hold("run trains step 3", 60.0),
    replicas=[ReplicaAddress("replica-0", "http://127.0.0.1:1")],
    base=ServedBase("tiny", "tiny", "base"),
    runs={"run": ServedRun(2, {1: Served("tiny", "run@1"), 2: Served("run@2", "run@2")})},
)
WIRE = (
    '{"epoch": 7, "hold": {"reason": "run trains step 3", "deadline_seconds": 60.0, "passing": null}, '
    '"replicas": [{"id": "replica-0", "url": "http://127.0.0.1:1"}], '
    '"base": {"name": "tiny", "engine_model": "tiny", "version": "base", "refusal": null}, '
    '"runs": {"run": {"latest": 2, "served": {"1": {"engine_model": "tiny", "version": "run@1"}, '
    '"2": {"engine_model": "run@2", "version": "run@2"}}, "promoted": null}}, '
    '"not_served": {}, "places": null, "max_loras": 4}'
)


def test_the_json_on_the_wire_stays_as_it_is() -> None:
    assert json.dumps(asdict(TABLE)) == WIRE


def test_the_gateway_reads_what_the_supervisor_writes() -> None:
    table = parse_table(WIRE.encode())
    assert (table.revision, table.hold) == (7, TABLE.hold)
    assert table.replicas == {"replica-0": "http://127.0.0.1:1"}
    assert table.resolve("tiny") == Target("tiny", None, 0, "tiny", "base")
    assert table.resolve("run@1") == Target("run@1", "run", 1, "tiny", "run@1")
    assert table.resolve("run") == Target("run@2", "run", 2, "run@2", "run@2", is_adapter=True)


def test_nothing_may_be_served() -> None:
    empty = replace(TABLE, hold=None, replicas=[], base=None, runs={})
    assert parse_table(json.dumps(asdict(empty)).encode()).names() == []


SERVED = {"engine_model": "tiny", "version": "run@1"}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"epoch": "7"}, "epoch"),
        ({"epoch": -1}, "epoch"),
        ({"hold": {"reason": "r", "deadline_seconds": -1}}, "hold.deadline_seconds"),
        ({"hold": {"reason": "r"}}, "hold.deadline_seconds"),
        ({"replicas": [{"id": "", "url": "http://h"}]}, "replicas.0.id"),
        ({"base": {"name": "tiny"}}, "base.engine_model"),
        ({"runs": {"run": {"latest": 1, "served": {"one": SERVED}}}}, "runs.run.served.one"),
        ({"runs": {"run": {"latest": 1, "served": {"-1": SERVED}}}}, "runs.run.served.-1"),
        ({"runs": {"run": {"latest": 1, "served": {"1": SERVED | {"version": None}}}}}, "served.1.version"),
        ({"router": {}}, "router: Extra inputs are not permitted"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(change: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest, match="Not a routing table: ") as refused:
        parse_table(json.dumps(json.loads(WIRE) | change).encode())
    assert place in refused.value.message


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Not a routing table"):
        parse_table(body)
