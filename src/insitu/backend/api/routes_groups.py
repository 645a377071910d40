"""Routes for trajectory groups."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from insitu.backend.api import views
from insitu.backend.api.bodies import GroupLine
from insitu.backend.api.routes_runs import RunName
from insitu.backend.api.settings import Services
from insitu.backend.api.upload import GroupReader
from insitu.errors import Conflict, InvalidRequest
from insitu.types import NAME_PATTERN, GroupState, RunState

GroupId = Annotated[str, Path(pattern=NAME_PATTERN.pattern)]

_NDJSON = "application/x-ndjson"
_UPLOAD_DOCS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One object a line: the group, then each trajectory followed by its inline calls.",
        "content": {_NDJSON: {"schema": {"$ref": "#/components/schemas/GroupLine"}}},
    }
}


def group_routes(services: Services) -> APIRouter:
    """Build the router."""
    ledger = services.ledger
    router = APIRouter(tags=["groups"])

    @router.put("/runs/{name}/groups/{group_id}", openapi_extra=_UPLOAD_DOCS, status_code=201)
    async def put_group(
        name: RunName, group_id: GroupId, request: Request, response: Response
    ) -> views.GroupReceipt:
        """Upload a group as NDJSON. 201: stored and durable. 200: it was there already."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _NDJSON:
            raise InvalidRequest(f"a group is sent as {_NDJSON}, not {kind or 'without a Content-Type'}")
        run = await run_in_threadpool(ledger.get_run, name)
        if run.state is RunState.CLOSED:
            raise Conflict(f"run {name!r} is closed", hint="register it again to go on: POST /v1/runs")
        async with services.uploads:
            reader = GroupReader(run, group_id, services.records, services.limits)
            group, body_hash = await reader.read(request.stream())
        created = await run_in_threadpool(ledger.put_group, group, body_hash)
        state = GroupState.RECEIVED
        if not created:
            response.status_code = 200
            state = (await run_in_threadpool(ledger.group_record, name, group_id)).state
        return views.GroupReceipt(
            id=group_id, run=name, state=state, created=created, num_trajectories=len(group.trajectories)
        )

    @router.get("/runs/{name}/groups/{group_id}")
    def get_group(name: RunName, group_id: GroupId) -> views.GroupView:
        """One group and its state."""
        record = ledger.group_record(name, group_id)
        return views.GroupView(
            id=group_id,
            run=name,
            state=record.state,
            job_id=record.job_id,
            step=record.step,
            created_at=record.created_at,
            trajectories=[views.TrajectoryView.model_validate(t) for t in record.group.trajectories],
        )

    return router


def upload_schemas() -> dict[str, Any]:
    """Return the schemas of upload lines, which OpenAPI cannot derive from the route's signature."""
    schema = GroupLine.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = schema.pop("$defs", {})
    return {**parts, "GroupLine": schema}
