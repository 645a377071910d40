"""The gateway as an aiohttp application: routes, handlers, start and stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

import orjson
from aiohttp import web

from insitu.access.day_use import gateway_use_file
from insitu.access.meters import Admission, KeyMeters
from insitu.access.routes import GATEWAY
from insitu.access.shares import Reservation, Shares
from insitu.access.strangers import Strangers
from insitu.errors import InsituError, NotFound, UpstreamError
from insitu.exposition import CONTENT_TYPE, exposition
from insitu.gateway.auth import KEY_HINT, Guard, Handler, error_response
from insitu.gateway.calls.attempt import CallContext, new_call_id
from insitu.gateway.calls.demonstrations import record_demonstration
from insitu.gateway.calls.labels import PROJECT, labels_of, named_rollout, sender_of
from insitu.gateway.calls.pipeline import Caller
from insitu.gateway.calls.streaming import stream_answer
from insitu.gateway.connection import STRANGERS, Connection
from insitu.gateway.description import describe
from insitu.gateway.engines.replicas import ReplicaPool
from insitu.gateway.engines.routes import Routes, Table, parse_table
from insitu.gateway.engines.standalone import table_of_upstreams
from insitu.gateway.metrics import metrics, rejection
from insitu.gateway.protocols.base import CallProtocol
from insitu.gateway.protocols.chat import ChatProtocol
from insitu.gateway.protocols.completions import CompletionsProtocol
from insitu.gateway.protocols.messages import MessagesProtocol
from insitu.gateway.protocols.request import load_body
from insitu.gateway.protocols.responses import ResponsesProtocol
from insitu.gateway.recording.journal import Journal, journal_folder, recover
from insitu.gateway.recording.listings import Listings, flag
from insitu.gateway.recording.recorder import Recorder
from insitu.gateway.recording.tally import Tallies, Ticket
from insitu.gateway.sampled_ids.restore import Restorer
from insitu.gateway.sampled_ids.token_texts import TokenTexts
from insitu.gateway.sampled_ids.tokenizers import Tokenizers
from insitu.gateway.shared.bodies import HOLDER, Bodies
from insitu.gateway.shared.counts import Counts
from insitu.gateway.shared.faults import Fault, internal_error
from insitu.gateway.shared.settings import Settings
from insitu.gateway.shared.unknown_fields import UnknownFields
from insitu.records.store import RecordStore
from insitu.wire.answers import DemonstrationReceipt, Readiness
from insitu.wire.gateway_state import (
    GatewayHealth,
    GatewayState,
    ModelCard,
    ModelList,
    ReplicaState,
    TableReceipt,
)
from insitu.wire.headers import CALL_ID_HEADER
from insitu.wire.message import Message, encode

_log = logging.getLogger(__name__)
_JSON = "application/json"
Response = TypeVar("Response", bound=web.StreamResponse)
_ADMISSION = web.RequestKey("admission", Admission)


def build_app(settings: Settings) -> web.Application:
    """Build the application; its parts start and stop with it."""
    settings.check()
    return Gateway(settings).app


class Gateway:
    """The parts of one gateway process and the handlers over them."""

    routes: Routes
    pool: ReplicaPool
    recorder: Recorder
    restorer: Restorer
    caller: Caller
    tallies: Tallies
    listings: Listings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = Guard(settings)
        keys = settings.keys_file
        self.meters = KeyMeters(None if keys is None else gateway_use_file(keys.parent, settings.number))
        self._protocols: dict[str, CallProtocol] = {
            "chat/completions": ChatProtocol(),
            "completions": CompletionsProtocol(),
            "responses": ResponsesProtocol(),
            "messages": MessagesProtocol(),
        }
        self._bodies = Bodies(settings.limits)
        self._calls = Shares(settings.limits.max_calls, "calls at this gateway")
        self._counts = Counts()
        self._unknown = UnknownFields(self._counts)
        self.app = web.Application(middlewares=[self._middleware])
        self._strangers = self.app[STRANGERS] = Strangers(GATEWAY, self._guard.knows, KEY_HINT)
        self.app.cleanup_ctx.append(self._lifetime)
        self.app.on_shutdown.append(self._stop_holding)
        self._add_routes()

    def _add_routes(self) -> None:
        router = self.app.router
        router.add_get("/health", _answering(self._health))
        router.add_get("/ready", _answering(self._ready))
        router.add_get("/metrics", self._metrics)
        router.add_get("/engines/{engine}/metrics", self._engine_metrics)
        router.add_get("/v1/openapi.json", self._describe)
        rollout = "/rollouts/{rollout_id}"
        for prefix in ("", rollout, rollout + "/functions/{function}"):
            for name, protocol in self._protocols.items():
                router.add_post(f"{prefix}/v1/{name}", self._handler(protocol))
            router.add_post(prefix + "/v1/messages/count_tokens", self._count_tokens)
            router.add_post(prefix + "/v1/demonstrations", _answering(self._demonstrate))
            router.add_get(prefix + "/v1/models", _answering(self._models))
            router.add_get(prefix + "/v1/models/{model:.+}", _answering(self._model))
        router.add_get(rollout + "/calls", self._list_calls)
        if not self._settings.upstreams:
            router.add_put("/control/routes", _answering(self._put_routes))
        router.add_get("/control/state", _answering(self._state))

    async def _lifetime(self, _app: web.Application):
        limits = self._settings.limits
        store = RecordStore(self._settings.records_url)
        folder = journal_folder(self._settings.records_url)
        journal = None if folder is None else Journal(folder)
        if folder is not None:
            await asyncio.to_thread(recover, folder, store)
        self.recorder = Recorder(store, max_backlog=limits.max_record_backlog, journal=journal)
        self.routes = Routes(default_hold_seconds=limits.hold_seconds)
        self.pool = ReplicaPool(limits, on_change=self.routes.wake, key=self._settings.engine_key)
        tokenizers = Tokenizers(self._settings.tokenizer)
        self.restorer = Restorer(limits, tokenizers)
        self.caller = Caller(
            self.routes, self.pool, self.recorder, self.restorer, tokenizers, limits, self._counts
        )
        self.tallies = Tallies(limits.max_counted_rollouts, on_first=self.recorder.count)
        texts = TokenTexts(self.routes, self.pool, tokenizers)
        self.listings = Listings(store, self.recorder, self.tallies, texts, limits)
        saving = asyncio.create_task(self.meters.keep_saved())
        try:
            self.pool.start()
            if self._settings.upstreams:
                self._install(await table_of_upstreams(self._settings.upstreams, limits))
            yield
        finally:
            saving.cancel()
            await self.pool.close()
            await self.meters.save()
            await asyncio.to_thread(self.listings.close)
            await asyncio.to_thread(self.recorder.close, limits.flush_seconds)
            store.close()

    async def _stop_holding(self, _app: web.Application) -> None:
        self.routes.close()  # calls under way may finish, held ones fail at once

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        protocol = self._protocols.get(request.path.rpartition("/v1/")[2])
        if protocol is None or request.method != "POST":
            return await self._admit(request, handler)
        began, status = time.monotonic(), "client_gone"
        try:
            response = await self._admit(request, handler)
            status = str(response.status)
            return response
        finally:
            self._counts.ended(protocol.name, status, time.monotonic() - began)

    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            holder = self._guard.identify(request)
            if holder is not None:
                request[PROJECT], request[HOLDER] = holder.project, holder
                if isinstance(request.protocol, Connection):
                    request.protocol.known()
                self._guard.authorise(request, holder)
            num_bytes = _body_bytes(request)
            with self.meters.admitted(holder, num_bytes) as admission:
                request[_ADMISSION] = admission
                try:
                    response = await handler(request)
                finally:
                    if num_bytes is None:
                        admission.spend_bytes(request.content.total_bytes)
            return _closing_to_strangers(request, response)
        except InsituError as error:
            return self._refusal(request, error)
        except web.HTTPException as error:  # no such path or method
            wrong = NotFound(f"{request.method} {request.path}: {error.reason}.")
            wrong.status = error.status
            return self._refusal(request, wrong)
        except ConnectionError:  # the client left
            raise
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            _log.exception("%s %s failed inside the gateway", request.method, request.path)
            return self._refusal(request, internal_error(error))

    def _refusal(self, request: web.Request, error: InsituError) -> web.Response:
        """Return an error in the shape of the protocol whose path was requested."""
        if (reason := rejection(error)) is not None:
            self._counts.rejected[reason] += 1
        protocol = self._protocols.get(request.path.rpartition("/v1/")[2].removesuffix("/count_tokens"))
        if PROJECT in request:
            error = sender_of(request).tell(error)
        response = error_response(error, protocol.error(error)[1] if protocol else None)
        return _closing_to_strangers(request, response)

    def _load(self, data: bytes) -> dict[str, Any]:
        return load_body(data, self._settings.limits)

    def _handler(self, spoken: CallProtocol) -> Handler:
        async def counted(request: web.Request) -> web.StreamResponse:
            request[_ADMISSION].check_tokens()
            with self.tallies.counted(named_rollout(request)) as ticket, self._place(request) as places:
                self.caller.refuse_unrecorded()
                async with self._bodies.of(request, self._load) as body:
                    return await call(request, ticket, body, places)

        async def call(
            request: web.Request, ticket: Ticket, body: dict[str, Any], places: Reservation
        ) -> web.StreamResponse:
            sender, protocol = sender_of(request), spoken
            if isinstance(spoken, ResponsesProtocol):
                protocol = spoken.within(sender.name)
            with self._unknown.of(_key_of(request), protocol.name):
                parsed = protocol.parse(body, self._settings.limits)
            ticket.expect(parsed.num_choices)
            places.grow(parsed.num_choices - 1)
            spend = request[_ADMISSION].spend_tokens
            context = CallContext(
                protocol,
                parsed,
                labels_of(request),
                new_call_id(),
                ticket,
                spend,
                project=sender,
                key=_key_of(request),
            )
            if parsed.stream:
                return await stream_answer(self.caller, context, request)
            answer = await self.caller.complete(context)
            headers = {CALL_ID_HEADER: context.call_id}
            return web.Response(body=orjson.dumps(answer.body), content_type=_JSON, headers=headers)

        return counted

    def _place(self, request: web.Request) -> AbstractContextManager[Reservation]:
        """Take a place among the gateway's calls, from before the body arrives to the end of the answer."""
        return self._calls.reserved(request.get(HOLDER), 1)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """Return the number of prompt tokens of a messages request."""
        protocol = self._protocols["messages"]
        with self._place(request):
            async with self._bodies.of(request, self._load) as body:
                with self._unknown.of(_key_of(request), protocol.name):
                    parsed = protocol.parse({"max_tokens": 1, **body}, self._settings.limits)
                labels, sender = labels_of(request), sender_of(request)
                context = CallContext(protocol, parsed, labels, new_call_id(), Ticket(None), project=sender)
                rendered = await self.caller.attempts(context, lambda a: protocol.render(a.lane, parsed))
        return web.json_response({"input_tokens": len(rendered.prompt_ids)})

    async def _demonstrate(self, request: web.Request) -> DemonstrationReceipt:
        with self.tallies.counted(named_rollout(request)) as ticket, self._place(request):
            self.caller.refuse_unrecorded()
            async with self._bodies.of(request, self._load) as body:
                labels, sender = labels_of(request), sender_of(request)
                spend = request[_ADMISSION].spend_tokens
                with self._unknown.of(_key_of(request), "demonstrations"):
                    return await record_demonstration(self.caller, body, labels, ticket, sender, spend)

    async def _describe(self, _request: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(describe(self._protocols)), content_type=_JSON)

    async def _metrics(self, _request: web.Request) -> web.Response:
        content = exposition(metrics(self._counts, self._strangers, self.recorder, self.routes, self.pool))
        return web.Response(body=content, headers={"content-type": CONTENT_TYPE})

    async def _engine_metrics(self, request: web.Request) -> web.Response:
        name = request.match_info["engine"]
        replica = self.pool.replicas.get(name)
        if replica is None:
            raise NotFound(
                f"The engine `{name[:80]}` is not in use.", hint="GET /health lists those that are"
            )
        try:
            content = await replica.engine.metrics()
        except Fault as error:
            raise UpstreamError(
                f"{replica.id} did not tell its metrics: {error}.", hint="retry later"
            ) from error
        return web.Response(body=content, headers={"content-type": CONTENT_TYPE})

    async def _health(self, _request: web.Request) -> GatewayHealth:
        # The process answers, so it is alive: `status` says whether a call would be served now.
        return GatewayHealth(
            status="unavailable" if list(self._lacks()) else "ok",
            replicas={replica.id: replica.healthy for replica in self.pool.replicas.values()},
            recording=self.recorder.refusal() or "ok",
            held=self.routes.held,
            put_back=self.restorer.report(),
        )

    async def _ready(self, _request: web.Request) -> Readiness:
        return Readiness.because(list(self._lacks()))

    def _lacks(self) -> Iterator[str]:
        """Yield the reasons why a call would not be served now. One that only waits for a step is served."""
        if self.routes.table is None:
            yield "no routing table has arrived yet"
        elif not any(replica.healthy for replica in self.pool.replicas.values()):
            yield "no engine answers"
        if (refusal := self.recorder.refusal()) is not None:
            yield refusal

    async def _models(self, request: web.Request) -> ModelList:
        return ModelList("list", [_model_card(name) for name in self._table().names(sender_of(request))])

    async def _model(self, request: web.Request) -> ModelCard:
        name = request.match_info["model"]
        table, sender = self._table(), sender_of(request)
        if table.missing(name, sender) is not None:
            table = await self.routes.admit(name, sender)
        table.resolve(name, sender)
        return _model_card(name)

    async def _list_calls(self, request: web.Request) -> web.Response:
        rollout_id = labels_of(request).rollout_id
        assert rollout_id is not None, "the path names it"
        tokens = flag(request.query, "tokens", default=True)
        pieces = flag(request.query, "pieces", default=False)
        holder = request.get(HOLDER)
        listed = await self.listings.of_rollout(rollout_id, tokens=tokens, pieces=pieces, holder=holder)
        return web.Response(body=listed, content_type=_JSON)

    async def _put_routes(self, request: web.Request) -> TableReceipt:
        async with self._bodies.of(request, parse_table) as table:
            self._install(table)
        return TableReceipt(self._table().revision)

    async def _state(self, _request: web.Request) -> GatewayState:
        return GatewayState(
            epoch=self.routes.table.revision if self.routes.table else None,
            held=self.routes.held,
            in_flight=dict(self.routes.in_flight),
            in_flight_total=self.routes.in_flight.total(),
            recorded=self.recorder.num_recorded,
            record_backlog=self.recorder.backlog,
            put_back=self.restorer.report(),
            replicas={r.id: ReplicaState(r.healthy, r.in_flight) for r in self.pool.replicas.values()},
            leaving=self.pool.leaving(),
            silent=self.routes.silent(),
            wanted=self.routes.wants(),
        )

    def _install(self, table: Table) -> None:
        self.routes.replace(table)
        self.pool.sync(table.replicas, table.places, table.max_loras)
        self.routes.wake()  # again: calls that waited for a replica see the new ones

    def _table(self) -> Table:
        if self.routes.table is None:
            raise UpstreamError("No routing table has arrived yet.", hint="retry when the backend is ready")
        return self.routes.table


def _answering(handler: Callable[[web.Request], Awaitable[Message]]) -> Handler:
    """Send the message that `handler` returns."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        message = await handler(request)
        status = message.status if isinstance(message, Readiness) else 200
        return web.Response(body=encode(message), status=status, content_type=_JSON)

    return answer


def _closing_to_strangers(request: web.Request, response: Response) -> Response:
    """Close a connection without a key so far after its answer: its next request is judged as its first."""
    if isinstance(request.protocol, Connection) and not request.protocol.is_known:
        response.force_close()
    return response


def _body_bytes(request: web.Request) -> int | None:
    """Return the declared length of the body; None if there is a body of another length."""
    return request.content_length or (None if request.body_exists else 0)


def _key_of(request: web.Request) -> str:
    """Return the name of the sender's key; empty for the operator's."""
    holder = request.get(HOLDER)
    return "" if holder is None else holder.key


def _model_card(name: str) -> ModelCard:
    return ModelCard(name, created=int(time.time()))
