"""A stand-in for vLLM's scale-out endpoints: the same wire shapes, fixed tokens, faults on demand.

It is not an engine: it proves how the gateway behaves when an upstream is slow, large, wrong or dead.
In a test it runs in-process (`async with StandinEngine() as engine`), for a benchmark in its own process
(``python tests/support/standin_engine.py --port N``).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from insitu.gateway.texts import hermes

PROMPT_IDS = [1, 9690, 198, 2683]
_SPELLED = 100_000  # a token for each character, beyond the fixed ones
END, NEWLINE = 2, 198
"""The token at which a generation stops, and what the template writes after it."""
_ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6, "developer": 7}


def spell(text: str) -> list[int]:
    """One token a character."""
    return list(_spelled(text))


@lru_cache(maxsize=16)
def _spelled(text: str) -> tuple[int, ...]:
    return tuple(_SPELLED + ord(character) for character in text)


def write_tokenizer(folder: Path, num_tokens: int) -> Path:
    """Write the `tokenizer.json` with which tokens have the text that derender gives them."""
    names = {f"Ġw{i}": 1000 + i for i in range(num_tokens)}
    names |= {f"p{token}": token for token in (*PROMPT_IDS, *_ROLES.values())}
    spelled = {chr(code): chr(code) for code in range(33, 127)} | {"Ġ": " ", "Ċ": "\n"}
    names |= {name: spell(character)[0] for name, character in spelled.items()}
    data = {"model": {"type": "BPE", "vocab": names}, "decoder": {"type": "ByteLevel"}, "added_tokens": []}
    (folder / "tokenizer.json").write_bytes(orjson.dumps(data))
    return folder


def spell_messages(messages: list[dict[str, Any]], *, open_turn: bool = True) -> list[int]:
    """A conversation up to the next answer; it starts with the prompt and answer of every earlier turn.

    Without `open_turn` it ends with the last message.
    """
    ids = list(PROMPT_IDS)
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        ids += [_ROLES.get(message["role"], 4), *spell(text)]
    return [*ids, _ROLES["assistant"]] if open_turn else [*ids, END, NEWLINE]


def read_messages(prompt_ids: list[int]) -> list[dict[str, str]]:
    """The conversation that `spell_messages` wrote."""
    names = {token: role for role, token in _ROLES.items()}
    messages: list[dict[str, str]] = []
    for token in prompt_ids[len(PROMPT_IDS) : -1]:
        if token in names:
            messages.append({"role": names[token], "content": ""})
        elif messages:
            messages[-1]["content"] += chr(token - _SPELLED)
    return messages


@dataclass
class Behaviour:
    """How the stand-in answers. Tests change fields between and during calls."""

    models: list[str] = field(default_factory=lambda: ["tiny"])
    adapters: list[str] = field(default_factory=list)
    weight_version: str = "base"
    delay_seconds: tuple[float, float] = (0.0, 0.0)
    """Uniform range of a generation's duration."""
    token_seconds: float = 0.0
    """Seconds more for each token that a generation may have."""
    gate: asyncio.Event | None = None
    """A generation that begins with a gate ends no earlier than it is set."""
    chunk_seconds: float = 0.0
    """Time per token of a stream."""
    keeps_interval: bool = False
    """True if a stream has the steps that were requested, else one chunk per token."""
    root: str | None = None
    """The directory of its tokenizer, as an engine lists it; see `write_tokenizer`."""
    num_tokens: int = 4
    answer_bytes: int = 0
    """Size of the text of an answer; 0: one word per token."""
    texts: list[str] = field(default_factory=list)
    """Answers to choose from at random, one token a character; empty: the fixed tokens."""
    answers: Callable[[list[dict[str, str]]], str] | None = None
    """The answer to a conversation (role and content of each message); goes before `texts`."""
    seed: int = 0
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    parser: bool = False
    hermes: bool = False
    """True if the parser is `hermes`; whole answers only, as the gateway's probe for it."""
    fault: str | None = None
    """One of the names in `_FAULTS`, applied to generate until it is cleared."""
    fault_count: int = -1
    """How many generations the fault spoils; -1: all."""
    healthy: bool = True


class StandinEngine:
    """One stand-in server. `seen` lists (path, body) of every request."""

    def __init__(self, behaviour: Behaviour | None = None, *, port: int = 0, keep_seen: bool = True) -> None:
        self.behaviour = behaviour or Behaviour()
        self.port = port
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.num_generating = 0
        self.num_aborted = 0
        self.delays: list[float] = []
        """The durations of all generations, in the order in which they began."""
        self._keep_seen = keep_seen
        self._random = random.Random(self.behaviour.seed)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def calls_to(self, path: str) -> list[dict[str, Any]]:
        return [body for seen, body in self.seen if seen == path]

    async def __aenter__(self) -> StandinEngine:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/standin/delays", self._list_delays)
        app.router.add_get("/standin/load", self._load)
        app.router.add_post("/v1/chat/completions", self._direct)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_post("/v1/chat/completions/derender", self._derender_chat)
        app.router.add_post("/v1/completions/render", self._render_completion)
        app.router.add_post("/v1/completions/derender", self._derender_completion)
        app.router.add_post("/inference/v1/generate", self._generate)
        self.add_routes(app)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=2048, reuse_address=True)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]

    def add_routes(self, app: web.Application) -> None:
        """Add routes of a stand-in that knows more of vLLM."""

    async def stop(self) -> None:
        """End as a killed process does: connections under way are cut."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = orjson.loads(await request.read())
        if self._keep_seen:
            self.seen.append((request.path, body))
        return body

    def _model_error(self, body: dict[str, Any]) -> web.Response | None:
        if body.get("model") in [*self.behaviour.models, *self.behaviour.adapters]:
            return None
        return _error(404, f"The model `{body.get('model')}` does not exist.")

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.behaviour.healthy else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        """Answer a little of what vLLM does."""
        return web.Response(
            text="# TYPE vllm:num_requests_waiting gauge\n"
            'vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0\n'
            "# TYPE vllm:lora_requests_info gauge\n"
            'vllm:lora_requests_info{running_lora_adapters="secret@1"} 1.0\n'
        )

    async def _list_delays(self, _request: web.Request) -> web.Response:
        return _json({"delays": self.delays, "num_aborted": self.num_aborted})

    async def _load(self, _request: web.Request) -> web.Response:
        return _json({"num_generating": self.num_generating})

    async def _models(self, _request: web.Request) -> web.Response:
        root = self.behaviour.root
        cards = [{"id": name, "parent": None, "root": root} for name in self.behaviour.models]
        cards += [{"id": name, "parent": self.behaviour.models[0]} for name in self.behaviour.adapters]
        return web.json_response({"object": "list", "data": cards})

    def _rendered(self, body: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        kept = ("temperature", "top_p", "seed", "stop", "logit_bias", "allowed_token_ids")
        sampling = {k: body[k] for k in kept if k in body}
        sampling["max_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens") or 1000
        if "response_format" in body:
            sampling["structured_outputs"] = {"json": {}}
        return {
            "token_ids": token_ids,
            "sampling_params": sampling,
            "model": body["model"],
            "request_id": "r",
        }

    async def _render_chat(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if self.behaviour.fault == "render-400":
            return _error(400, "the template does not like this")
        if self.behaviour.fault == "render-500":
            return _error(500, "'function'")
        if self.behaviour.answers or self.behaviour.texts:
            ids = spell_messages(body["messages"], open_turn=body.get("add_generation_prompt", True))
            return self._model_error(body) or _json(self._rendered(body, ids))
        # Longer conversations extend shorter ones, as an append-only template does.
        ids = PROMPT_IDS + [10 + len(str(m.get("content"))) % 90 for m in body["messages"]]
        return self._model_error(body) or _json(self._rendered(body, ids))

    async def _render_completion(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else [*PROMPT_IDS, len(prompt)]
        return self._model_error(body) or _json([self._rendered(body, ids)])

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        if (wrong := self._model_error(body)) is not None:
            return wrong
        if self.behaviour.answers is None and not self._keep_seen:
            body["token_ids"] = range(len(body["token_ids"]))  # thousands of long prompts may wait here
        self.num_generating += 1
        try:
            return await self._generate_with_faults(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        finally:
            self.num_generating -= 1

    async def _generate_with_faults(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault, gate = self._next_fault(), self.behaviour.gate
        if fault == "hang":
            await asyncio.sleep(3600)
        asked = body["sampling_params"].get("max_tokens") or 0
        seconds = random.uniform(*self.behaviour.delay_seconds) + self.behaviour.token_seconds * asked
        self.delays.append(seconds)
        await asyncio.sleep(self.delays[-1])
        if gate is not None:
            await gate.wait()
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(10)
        if fault in ("500", "503", "429", "400"):
            return _error(int(fault), "injected")
        if fault == "bad-json":
            return web.Response(body=b'{"choices": [', content_type="application/json")
        answer = self._generated(body)
        if fault in _FAULTS:
            _FAULTS[fault](answer)
        if body.get("stream"):
            asked = body["sampling_params"].get("stream_interval") if self.behaviour.keeps_interval else None
            cut, error = fault == "cut", fault == "stream-error"
            return await self._stream(request, answer, asked or 1, cut=cut, error=error)
        return _json(answer)

    def _next_fault(self) -> str | None:
        behaviour = self.behaviour
        if behaviour.fault is None or behaviour.fault_count == 0:
            return None
        behaviour.fault_count -= 1 if behaviour.fault_count > 0 else 0
        return behaviour.fault

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, finish_reason = self._sampled(body)
        count = len(ids)
        allowed = body.get("sampling_params", {}).get("allowed_token_ids")
        entries = [
            {
                "token_id": t,
                # All tokens of one place are equally likely, so that a mask leaves each of n with 1/n.
                "logprob": -math.log(len(allowed)) if allowed else -0.5 - i % 7,
                "rank": 1,
                "top_logprobs": [{"token_id": t, "logprob": -0.5}],
            }
            for i, t in enumerate(ids)
        ]
        choice = {
            "index": 0,
            "finish_reason": finish_reason,
            "stop_reason": self.behaviour.stop_reason,
            "token_ids": ids,
            "logprobs": {"content": entries},
            "weight_versions": [{"version": self.behaviour.weight_version, "start": 0, "end": count}],
        }
        usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": count}
        return {"request_id": "g", "model": body["model"], "usage": usage, "choices": [choice]}

    def _sampled(self, body: dict[str, Any]) -> tuple[list[int], str]:
        behaviour = self.behaviour
        if allowed := body.get("sampling_params", {}).get("allowed_token_ids"):
            return allowed[:1], "stop" if allowed == [END] else "length"
        if behaviour.answers is not None:
            text = behaviour.answers(read_messages(body["token_ids"]))
        elif behaviour.texts:
            text = self._random.choice(behaviour.texts)
        else:
            return [1000 + i for i in range(behaviour.num_tokens)], behaviour.finish_reason
        ids = spell(text or " ")
        most = body.get("sampling_params", {}).get("max_tokens") or len(ids)
        return ids[:most], behaviour.finish_reason if len(ids) <= most else "length"

    async def _stream(
        self, request: web.Request, answer: dict[str, Any], interval: int, *, cut: bool, error: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        whole = answer["choices"][0]
        last = len(whole["token_ids"] or []) - 1
        entries = (whole["logprobs"] or {}).get("content") or []
        ids, start = whole["token_ids"] or [], 0
        for i in range(len(ids)):
            if 0 < start <= i < min(start + interval - 1, last):  # the step is not full
                await asyncio.sleep(self.behaviour.chunk_seconds)
                continue
            now, start = slice(start, i + 1), i + 1
            part = {"index": 0, "token_ids": ids[now], "logprobs": {"content": entries[now]}}
            part |= {"finish_reason": None, "stop_reason": None, "weight_versions": None}
            if i == last:
                part |= {k: whole[k] for k in ("finish_reason", "stop_reason", "weight_versions")}
            await response.write(_event({"request_id": "g", "usage": None, "choices": [part]}))
            await asyncio.sleep(self.behaviour.chunk_seconds)
            if (cut or error) and i == last // 2:
                if error:
                    await response.write(_event({"error": {"message": "injected"}}) + b"data: [DONE]\n\n")
                    return response
                assert request.transport is not None
                request.transport.abort()
                return response
        await response.write(_event({"request_id": "g", "usage": answer["usage"], "choices": []}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _text(self, token_ids: list[int]) -> str:
        if token_ids and token_ids[0] >= _SPELLED:
            return "".join(chr(t - _SPELLED) for t in token_ids)
        if self.behaviour.answer_bytes:
            each = max(self.behaviour.answer_bytes // self.behaviour.num_tokens, 1)
            return ("word " * (each // 5 + 1))[:each] * len(token_ids)
        return "".join(f" w{t - 1000}" for t in token_ids)

    async def _derender_chat(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if (wrong := self._model_error(body)) is not None:
            return wrong
        if self.behaviour.parser and "chat_request" not in body:
            return _error(400, "chat_request is required when a tool or reasoning parser is configured")
        if not body.get("stream"):
            choice = body["generate_response"]["choices"][0]
            message = {"role": "assistant", "content": self._text(choice["token_ids"]), "refusal": None}
            if self.behaviour.hermes and body["chat_request"].get("tools"):
                message = hermes.message_of(self._text(choice["token_ids"])) or message
            elif self.behaviour.parser and body["chat_request"].get("tools"):
                function = {"name": "look", "arguments": "{}"}
                message |= {
                    "content": None,
                    "tool_calls": [{"id": "t1", "type": "function", "function": function}],
                }
            return _json({"choices": [{"index": 0, "message": message, "logprobs": self._named(choice)}]})
        choices = [
            {
                "index": 0,
                "delta": {"role": None, "content": self._text(choice["token_ids"])},
                "logprobs": self._named(choice),
                "finish_reason": choice["finish_reason"],
            }
            for choice in body["generate_chunk"]["choices"]
        ]
        return _json({"chunk": {"choices": choices}, "stream_state": {"turn": 1}})

    def _named(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """The logprobs with the text of each token, which only derender knows."""
        if not choice.get("logprobs"):
            return None
        entries = choice["logprobs"]["content"]
        return {"content": [{**entry, "token": self._text([entry["token_id"]])} for entry in entries]}

    async def _derender_completion(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        streaming = body.get("stream")
        choice = (body["generate_chunk"] if streaming else body["generate_responses"][0])["choices"][0]
        out = {"index": 0, "text": self._text(choice["token_ids"]), "logprobs": None}
        return _json({"chunk": {"choices": [out]}, "stream_state": {}} if streaming else {"choices": [out]})

    async def _direct(self, request: web.Request) -> web.Response:
        """One hop with the same delay and size: what the gateway is compared with."""
        body = await self._body(request)
        await asyncio.sleep(random.uniform(*self.behaviour.delay_seconds))
        generated = self._generated({"model": body["model"], "token_ids": PROMPT_IDS})
        generated["choices"][0]["message"] = {
            "role": "assistant",
            "content": self._text(generated["choices"][0]["token_ids"]),
        }
        return _json(generated | {"created": int(time.time())})


def _drop_ids(answer: dict[str, Any]) -> None:
    answer["choices"][0]["token_ids"] = None


def _drop_logprobs(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"] = None


def _short_logprobs(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["content"].pop()


def _missing_logprob(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["content"][-1]["logprob"] = -9999.0


def _null_logprob(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = None


def _wrong_token(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["content"][0]["token_id"] = 7


def _wrong_usage(answer: dict[str, Any]) -> None:
    answer["usage"]["completion_tokens"] += 1


def _wrong_prompt_usage(answer: dict[str, Any]) -> None:
    answer["usage"]["prompt_tokens"] += 1


def _mixed_weights(answer: dict[str, Any]) -> None:
    answer["choices"][0]["weight_versions"].append({"version": "other", "start": 1, "end": 2})


def _no_weights(answer: dict[str, Any]) -> None:
    answer["choices"][0]["weight_versions"] = None


def _aborted(answer: dict[str, Any]) -> None:
    answer["choices"][0]["finish_reason"] = "abort"


_FAULTS = {
    "no-ids": _drop_ids,
    "no-logprobs": _drop_logprobs,
    "short-logprobs": _short_logprobs,
    "missing-logprob": _missing_logprob,
    "null-logprob": _null_logprob,
    "wrong-token": _wrong_token,
    "wrong-usage": _wrong_usage,
    "wrong-prompt-usage": _wrong_prompt_usage,
    "mixed-weights": _mixed_weights,
    "no-weights": _no_weights,
    "aborted": _aborted,
}
UNRECORDABLE = [
    *("no-ids", "no-logprobs", "short-logprobs", "missing-logprob", "null-logprob", "wrong-token"),
    *("wrong-usage", "wrong-prompt-usage"),
]


def _json(body: object) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


def _event(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def _serve(arguments: argparse.Namespace) -> None:
    behaviour = Behaviour(
        delay_seconds=(arguments.min_seconds, arguments.max_seconds),
        num_tokens=arguments.tokens,
        answer_bytes=arguments.bytes,
        chunk_seconds=arguments.chunk_seconds,
        keeps_interval=True,
        root=arguments.root,
        parser=arguments.parser or arguments.hermes,
        hermes=arguments.hermes,
        texts=["x" * arguments.text_chars] if arguments.text_chars else [],
    )
    async with StandinEngine(behaviour, port=arguments.port, keep_seen=False):
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--min-seconds", type=float, default=0.0)
    parser.add_argument("--max-seconds", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--chunk-seconds", type=float, default=0.0)
    parser.add_argument("--parser", action="store_true", help="an engine that parses tools")
    parser.add_argument("--hermes", action="store_true", help="one whose parser is `hermes`")
    parser.add_argument("--text-chars", type=int, default=0, help="answers of one token a character")
    parser.add_argument("--root", help="the directory of a tokenizer that write_tokenizer wrote")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
