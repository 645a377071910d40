"""The one table of who may call which route. Both doors check by it, and docs/keys.md prints it.

`submit` covers everything that `insitu finetune` and `insitu eval` do by themselves; deletions need `admin`,
and so does the choice of the step that calls to a run's plain name get.
A key of a project reaches the runs, jobs, calls and uploads of that project only, whatever its scopes; the
routes in `NOBODYS` have nothing of any project.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias

from insitu.access.scopes import Scope


class Access(StrEnum):
    """Access to a route that no scope decides."""

    OPEN = "no key"
    LOGIN = "a key in the body"
    """Exchanges a key for a session. Unlike an open route it is not parsed beyond the pace of strangers."""
    ANY_KEY = "any key"
    WHOLE = "admin, no project"
    """Of the whole backend: a key of a project administers the things of its project only."""
    SUPERVISOR = "supervisor"
    """The key that the supervisor shares with its gateway, from loopback only."""


Need: TypeAlias = Scope | Access
Table: TypeAlias = Mapping[str, Need]
"""By `METHOD /path`, with the path as the application routes it."""

API: Table = {
    "GET /": Access.OPEN,
    "GET /app.js": Access.OPEN,
    "GET /app.css": Access.OPEN,
    "GET /icon.svg": Access.OPEN,
    "POST /login": Access.LOGIN,
    "POST /logout": Access.ANY_KEY,
    "GET /session": Access.ANY_KEY,
    "GET /health": Access.OPEN,
    "GET /ready": Access.OPEN,
    "GET /metrics": Access.ANY_KEY,
    "GET /v1/openapi.json": Access.ANY_KEY,
    "GET /v1/fleet": Scope.SUBMIT,
    "GET /v1/runs": Scope.SUBMIT,
    "POST /v1/runs": Scope.SUBMIT,
    "GET /v1/runs/{name}": Scope.SUBMIT,
    "DELETE /v1/runs/{name}": Scope.ADMIN,
    "POST /v1/runs/{name}/close": Scope.SUBMIT,
    "POST /v1/runs/{name}/alive": Scope.SUBMIT,
    "POST /v1/runs/{name}/release": Scope.SUBMIT,
    "PUT /v1/adapters/{sha256}": Scope.SUBMIT,
    "GET /v1/runs/{name}/groups/{group_id}": Scope.SUBMIT,
    "PUT /v1/runs/{name}/groups/{group_id}": Scope.SUBMIT,
    "GET /v1/runs/{name}/steps": Scope.SUBMIT,
    "POST /v1/runs/{name}/steps": Scope.SUBMIT,
    "GET /v1/jobs/{job_id}": Scope.SUBMIT,
    "GET /v1/jobs/{job_id}/events": Scope.SUBMIT,
    "POST /v1/jobs/{job_id}/cancel": Scope.SUBMIT,
    "GET /v1/runs/{name}/leases/{lease_id}": Scope.SUBMIT,
    "PUT /v1/runs/{name}/leases/{lease_id}": Scope.SUBMIT,
    "DELETE /v1/runs/{name}/leases/{lease_id}": Scope.SUBMIT,
    "GET /v1/runs/{name}/promotions": Scope.SUBMIT,
    "PUT /v1/runs/{name}/promoted/{step}": Scope.ADMIN,
    "DELETE /v1/runs/{name}/promoted": Scope.ADMIN,
    "POST /v1/runs/{name}/promotions/{promotion_id}/rollback": Scope.ADMIN,
    "GET /v1/runs/{name}/checkpoints": Scope.SUBMIT,
    "GET /v1/runs/{name}/checkpoints/{step}/files/{file}": Scope.SUBMIT,
    "PUT /v1/runs/{name}/checkpoints/{step}/pin": Scope.SUBMIT,
    "DELETE /v1/runs/{name}/checkpoints/{step}/pin": Scope.SUBMIT,
    "DELETE /v1/runs/{name}/checkpoints/{step}": Scope.ADMIN,
    "GET /healthcheck": Access.ANY_KEY,
    "POST /register": Scope.SUBMIT,
    "POST /_get_step": Scope.SUBMIT,
    "POST /_prepare_backend_for_training": Scope.SUBMIT,
    "POST /_train_model": Scope.SUBMIT,
    "POST /_delete_checkpoint_files": Scope.ADMIN,
    "POST /close": Scope.SUBMIT,
}
PREFIXES = ("", "/rollouts/{rollout_id}", "/rollouts/{rollout_id}/functions/{function}")
"""A model call may name its rollout and function before the path."""
_CALLS = (
    "POST {}/v1/chat/completions",
    "POST {}/v1/completions",
    "POST {}/v1/responses",
    "POST {}/v1/messages",
    "POST {}/v1/messages/count_tokens",
    "POST {}/v1/demonstrations",
    "GET {}/v1/models",
    "GET {}/v1/models/{{model}}",
)
GATEWAY: Table = {
    "GET /health": Access.OPEN,
    "GET /ready": Access.OPEN,
    "GET /metrics": Access.ANY_KEY,
    "GET /engines/{engine}/metrics": Access.ANY_KEY,
    "GET /v1/openapi.json": Access.ANY_KEY,
    **{call.format(prefix): Scope.INFER for prefix in PREFIXES for call in _CALLS},
    "GET /rollouts/{rollout_id}/calls": Scope.INFER,
    "GET /control/state": Access.SUPERVISOR,
    "PUT /control/routes": Access.SUPERVISOR,
}
NOBODYS = frozenset(
    {
        *("GET /", "GET /app.js", "GET /app.css", "GET /icon.svg"),
        *("POST /login", "POST /logout", "GET /session"),
        *(
            "GET /health",
            "GET /ready",
            "GET /metrics",
            "GET /engines/{engine}/metrics",
            "GET /v1/openapi.json",
            "GET /healthcheck",
            "POST /close",
        ),
        *("GET /control/state", "PUT /control/routes"),
    }
)
"""Routes that show and change nothing of a project. Tests hold every other one to its key's project."""


def need_of(table: Table, method: str, path: str) -> Need:
    """Return the access that a route needs; one that is not in the table needs `admin` and no project."""
    return table.get(f"{'GET' if method == 'HEAD' else method} {path}", Access.WHOLE)
