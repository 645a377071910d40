"""The routes under /view/v1: all GET, but for two on a group: score it again, or go on from a fork."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query
from starlette.responses import Response, StreamingResponse

from insitu.view.answers.alarms import alarms_of
from insitu.view.answers.comparison import compare_view
from insitu.view.answers.groups import group_page, group_view
from insitu.view.answers.one_rollout import rollout_view
from insitu.view.answers.overview import config_view, run_view, summary
from insitu.view.answers.resampling import MOST_AT_ONCE, MOST_TOKENS, BesideAgent, Fork
from insitu.view.answers.rollouts import rollouts_view
from insitu.view.answers.stored import find_rollout
from insitu.view.answers.trees import tree_view
from insitu.view.catalogue import Catalogue
from insitu.view.http.events import Streams, admit, parse_seen, stream
from insitu.view.http.responses import MessageResponse
from insitu.view.reading.query import Filters
from insitu.view.run import ViewedRun
from insitu.wire.views.rollouts import Fate
from insitu.wire.views.runs import RunListView, StoreKind

PREFIX = "/view/v1"
_MOST = 200
_MOST_SIBLINGS = 64
_MAX_CHARS = 300

Limit = Annotated[int, Query(ge=1, le=_MOST)]
Siblings = Annotated[int, Query(ge=1, le=_MOST_SIBLINGS)]
Text = Annotated[str | None, Query(max_length=_MAX_CHARS)]
Place = Annotated[int, Path(ge=0, lt=2**31)]
Number = Annotated[int | None, Query(ge=0, lt=2**31)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


def filters_of(
    store: Text = None,
    epoch: Number = None,
    kind: StoreKind | None = None,
    index: Number = None,
    ending: Text = None,
    fate: Fate | None = None,
    reason: Text = None,
    min_reward: Reward = None,
    max_reward: Reward = None,
    text: Text = None,
    example: Text = None,
) -> Filters:
    """Read the filters of a list."""
    return Filters(
        store, epoch, kind, index, ending, fate, reason, min_reward, max_reward, text, example_id=example
    )


Filtered = Annotated[Filters, Depends(filters_of)]


def view_routes(catalogue: Catalogue, streams: Streams, beside: BesideAgent | None = None) -> APIRouter:
    """Return the routes over a catalogue. FastAPI runs each of these functions in a thread.

    `beside` runs the user's reward and uses the configuration's key: for a server beside the agent alone.
    """
    router = APIRouter(prefix=PREFIX)

    def opened(run: str) -> ViewedRun:
        found = catalogue.get(run)
        found.use()
        return found

    @router.get("/runs")
    def runs() -> Response:  # pyright: ignore[reportUnusedFunction]
        found, problems = catalogue.runs()
        listed = sorted(map(summary, found), key=lambda each: each.started_at or 0.0, reverse=True)
        return MessageResponse(RunListView(listed, str(catalogue.root), problems))

    @router.get("/runs/{run}")
    def one_run(run: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        found = run_view(opened(run))
        if beside is not None:
            found = replace(found, rescoring=beside.rescoring.token, configured=beside.configured)
        return MessageResponse(found)

    @router.get("/runs/{run}/config")
    def config(run: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return MessageResponse(config_view(catalogue.get(run)))

    @router.get("/runs/{run}/alarms")
    def alarms(run: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return MessageResponse(alarms_of(catalogue.get(run)))

    @router.get("/runs/{run}/rollouts")
    def rollouts(  # pyright: ignore[reportUnusedFunction]
        run: str, filters: Filtered, sort: str = "oldest", cursor: Text = None, limit: Limit = 50
    ) -> Response:
        return MessageResponse(rollouts_view(opened(run), filters, sort, cursor, limit))

    @router.get("/runs/{run}/rollouts/{rollout_id}")
    def one_rollout(run: str, rollout_id: str, tokens: bool = True) -> Response:  # pyright: ignore[reportUnusedFunction]
        return MessageResponse(rollout_view(opened(run), rollout_id, tokens=tokens))

    @router.get("/runs/{run}/groups")
    def groups(  # pyright: ignore[reportUnusedFunction]
        run: str, filters: Filtered, sort: str = "oldest", cursor: Text = None, limit: Limit = 50
    ) -> Response:
        return MessageResponse(group_page(opened(run), filters, sort, cursor, limit))

    @router.get("/runs/{run}/groups/{store}/{index}")
    def one_group(run: str, store: str, index: Place, limit: Siblings = _MOST_SIBLINGS) -> Response:  # pyright: ignore[reportUnusedFunction]
        return MessageResponse(group_view(opened(run), store, index, limit))

    if beside is not None:

        @router.post("/runs/{run}/groups/{store}/{index}/rescore")
        def rescore(run: str, store: str, index: Place) -> Response:  # pyright: ignore[reportUnusedFunction]
            return MessageResponse(beside.rescoring.group(opened(run), store, index))

        @router.post("/runs/{run}/groups/{store}/{index}/resample")
        def resample(  # pyright: ignore[reportUnusedFunction]
            run: str,
            store: str,
            index: Place,
            rollout: Annotated[str, Query(max_length=_MAX_CHARS)],
            sequence: Annotated[int, Query(ge=0, lt=2**31)],
            depth: Annotated[int, Query(ge=1, lt=2**31)],
            step: Number = None,
            count: Annotated[int, Query(ge=1, le=MOST_AT_ONCE)] = 4,
            max_tokens: Annotated[int, Query(ge=1, le=MOST_TOKENS)] = 256,
        ) -> Response:
            fork = Fork(rollout, sequence, depth)
            return MessageResponse(
                beside.resampling.fork(opened(run), store, index, fork, step, count, max_tokens)
            )

    @router.get("/runs/{run}/tree")
    def tree(  # pyright: ignore[reportUnusedFunction]
        run: str, rollout: Annotated[list[str], Query(min_length=1, max_length=_MOST_SIBLINGS)]
    ) -> Response:
        found = opened(run)
        return MessageResponse(
            tree_view(found, [find_rollout(found, each) for each in dict.fromkeys(rollout)])
        )

    @router.get("/runs/{run}/compare")
    def compare(  # pyright: ignore[reportUnusedFunction]
        run: str, before: str, after: str, other: Text = None, cursor: Text = None, limit: Limit = 50
    ) -> Response:
        first = opened(run)
        second = first if other is None else opened(other)
        return MessageResponse(compare_view(first, before, second, after, cursor, limit))

    @router.get("/runs/{run}/events")
    def events(  # pyright: ignore[reportUnusedFunction]
        run: str,
        last_event_id: Annotated[str | None, Header()] = None,
        after: Text = None,
    ) -> Response:
        found, seen = opened(run), parse_seen(last_event_id or after)
        admit(streams)
        headers = {"cache-control": "no-store"}
        return StreamingResponse(
            stream(found, streams, seen), media_type="text/event-stream", headers=headers
        )

    return router
