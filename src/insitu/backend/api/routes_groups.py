"""Routes for trajectory groups."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from insitu.backend.api.requests import new_router
from insitu.backend.api.responses import shown, shown_group
from insitu.backend.api.routes_runs import RunName
from insitu.backend.api.security import Sender, holder_of
from insitu.backend.api.settings import Services
from insitu.backend.api.turns import upload_turn
from insitu.backend.api.upload import GroupReader
from insitu.backend.ledger.runs import refuse_states
from insitu.errors import InvalidRequest
from insitu.json_values import JsonObject, as_object
from insitu.types import NAME_PATTERN, GroupState, RunState
from insitu.wire.answers import GroupInfo, GroupReceipt
from insitu.wire.group_upload import GroupLine
from insitu.wire.message import schema_of

GroupId = Annotated[str, Path(pattern=NAME_PATTERN.pattern)]

_NDJSON = "application/x-ndjson"
_UPLOAD_DOCS: JsonObject = {
    "requestBody": {
        "required": True,
        "description": "One object a line: the group, then each trajectory followed by its inline calls.",
        "content": {_NDJSON: {"schema": {"$ref": "#/components/schemas/GroupLine"}}},
    }
}


def group_routes(services: Services) -> APIRouter:
    """Build the router."""
    ledger = services.ledger
    router = new_router("groups")

    @router.put("/runs/{name}/groups/{group_id}", openapi_extra=_UPLOAD_DOCS, status_code=201)
    async def put_group(
        name: RunName, group_id: GroupId, request: Request, response: Response, sender: Sender
    ) -> GroupReceipt:
        """Upload a group as NDJSON. 201: stored and durable. 200: it was there already."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _NDJSON:
            raise InvalidRequest(f"a group is sent as {_NDJSON}, not {kind or 'without a Content-Type'}")
        run = await run_in_threadpool(ledger.get_run, name)
        refuse_states(run, RunState.CLOSED)
        async with upload_turn(services, await holder_of(request)):
            with GroupReader(run, group_id, services.records, services.limits, sender) as reader:
                group, body_hash = await reader.read(request.stream())
                if not await run_in_threadpool(ledger.has_group, group, body_hash):
                    await run_in_threadpool(reader.store)
        created = await run_in_threadpool(ledger.put_group, group, body_hash)
        state = GroupState.RECEIVED
        if not created:
            response.status_code = 200
            state = (await run_in_threadpool(ledger.group_record, name, group_id)).state
        receipt = GroupReceipt(
            id=group_id, run=name, state=state, created=created, num_trajectories=len(group.trajectories)
        )
        return shown(sender, receipt)

    @router.get("/runs/{name}/groups/{group_id}")
    def get_group(name: RunName, group_id: GroupId, sender: Sender) -> GroupInfo:
        """One group and its state."""
        record = ledger.group_record(name, group_id)
        group = GroupInfo(
            id=group_id,
            run=name,
            state=record.state,
            job_id=record.job_id,
            step=record.step,
            created_at=record.created_at,
            trajectories=record.group.trajectories,
        )
        return shown_group(sender, group)

    return router


def upload_schemas() -> JsonObject:
    """Return the schemas of upload lines, which OpenAPI cannot derive from the route's signature."""
    schema = schema_of(GroupLine, "#/components/schemas/{model}")
    parts = as_object(schema.pop("$defs", None)) or {}
    return {**parts, "GroupLine": schema}
