"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from insitu.errors import InsituError, InvalidRequest
from insitu.gateway.engines.sample import Generated, Sample
from insitu.gateway.protocols.base import (
    SEED_TOKENS,
    Answer,
    Event,
    Lane,
    Rendered,
    StopTrimmer,
    envelope,
    generate_body,
    tokens_only,
    usage_of,
)
from insitu.gateway.protocols.bounds import check_ids
from insitu.gateway.protocols.derender import decoded, local_text
from insitu.gateway.protocols.request import COMMON_FIELDS, CallRequest, check_count, common_request
from insitu.gateway.shared.faults import reading, text_of
from insitu.gateway.shared.settings import Limits

_RENDER, _DERENDER = "/v1/completions/render", "/v1/completions/derender"
_FIELDS = frozenset({"prompt", "add_special_tokens", "echo", "best_of", "suffix"})
_DEFAULT_MAX_TOKENS = 16  # of OpenAI's completions


class CompletionsProtocol:
    """A prompt, as text or as token ids, in; its continuation out."""

    name = "completions"
    fields = _FIELDS | COMMON_FIELDS
    sends_done = True

    def parse(self, body: dict[str, Any], limits: Limits) -> CallRequest:
        """Check a request; InvalidRequest names what is rejected and why."""
        for key, neutral in (("echo", (None, False)), ("suffix", (None, "")), ("best_of", (None, 1))):
            if body.get(key) not in neutral:
                raise InvalidRequest(f"`{key}` is not supported by this gateway.")
        max_tokens = check_count(body, "max_tokens", limits.max_output_tokens) or _DEFAULT_MAX_TOKENS
        logprobs = body.get("logprobs")
        if logprobs is not None and (not isinstance(logprobs, int) or isinstance(logprobs, bool)):
            raise InvalidRequest(f"`logprobs` is {logprobs!r}; completions take an integer.")
        request = common_request(body, _FIELDS, logprobs, limits)
        for key in ("echo", "suffix", "best_of"):
            request.body.pop(key, None)
        request.body.update(prompt=_one_prompt(body.get("prompt")), max_tokens=max_tokens)
        return request

    async def render(self, lane: Lane, request: CallRequest) -> Rendered:
        rendered = await lane.engine.post(_RENDER, {**request.body, "model": lane.engine_model})
        with reading():
            first = rendered[0]
        made = generate_body(lane, request, first)
        return replace(made, from_text=isinstance(request.body["prompt"], str))

    async def answer(
        self, lane: Lane, request: CallRequest, rendered: Rendered, generated: dict[str, Any], sample: Sample
    ) -> Answer:
        """Build the completion for a verified sample."""
        local, logprobs = local_text(lane, request, rendered), None
        said = own = "" if local is None else await decoded(lane, local, sample.output_ids)
        if local is None or not local.alone:
            said, logprobs = await self._derendered(lane, request, rendered, generated)
        if local is not None and not local.alone:
            local.compare(own, said)
        said = StopTrimmer(request).feed(said, sample)
        out: dict[str, Any] = {
            "index": 0,
            "text": said,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
        }
        body = envelope("text_completion", lane, [out])
        body["usage"] = usage_of(len(rendered.prompt_ids), len(sample.output_ids))
        if request.return_token_ids:
            out["token_ids"], out["prompt_token_ids"] = sample.output_ids, rendered.prompt_ids
        return Answer(body, {"text": said})

    async def _derendered(
        self, lane: Lane, request: CallRequest, rendered: Rendered, generated: dict[str, Any]
    ) -> tuple[str, Any]:
        """Return the text that the engine makes of the tokens, and their logprobs."""
        answer = await lane.engine.post(
            _DERENDER,
            {
                "model": lane.engine_model,
                "generate_responses": [{"choices": [tokens_only(generated["choices"][0], request)]}],
                "prompt_tokens": [len(rendered.prompt_ids)],
                "prompt_token_ids": [rendered.prompt_ids[-SEED_TOKENS:]],
                **_decoding(request),
            },
        )
        with reading():
            choice = answer["choices"][0]
            return text_of(choice["text"]), choice.get("logprobs")

    def stream_text(self, lane: Lane, request: CallRequest, rendered: Rendered) -> CompletionsStream:
        return CompletionsStream(lane, request, rendered)

    def error(self, error: InsituError, _num_sent: int = 0, /) -> Event:
        return None, error.to_wire()


class CompletionsStream:
    """The chunks of one streamed completion, and the text that they add up to."""

    def __init__(self, lane: Lane, request: CallRequest, rendered: Rendered) -> None:
        self._lane, self._request, self._rendered = lane, request, rendered
        self._trimmer = StopTrimmer(request)
        self._local = local_text(lane, request, rendered)
        self._own = self._derendered = ""
        self._state: dict[str, Any] | None = None
        self._text = ""

    async def chunk(self, generated: Generated, finished: Sample | None) -> list[Event]:
        """Return the client's chunk for the tokens that arrived together."""
        local, logprobs = self._local, None
        said = "" if local is None else await decoded(self._lane, local, generated.token_ids)
        if local is None or not local.alone:
            self._own += said
            said, logprobs = await self._derender(generated, finished)
            self._derendered += said
        if local is not None and not local.alone and finished is not None:
            local.compare(self._own, self._derendered)
        said = self._trimmer.feed(said, finished)
        self._text += said
        out: dict[str, Any] = {
            "index": 0,
            "text": said,
            "logprobs": logprobs,
            "finish_reason": finished.finish_reason if finished else None,
        }
        if self._request.return_token_ids:
            out["token_ids"] = generated.token_ids
        return [(None, envelope("text_completion", self._lane, [out]))]

    async def _derender(self, generated: Generated, finished: Sample | None) -> tuple[str, Any]:
        """Return the text that the engine makes of the tokens, and their logprobs."""
        part = {
            "finish_reason": generated.finish_reason if finished else None,
            "stop_reason": generated.stop_reason,
            "token_ids": generated.token_ids,
            "logprobs": {"content": generated.logprob_entries},
        }
        answer = await self._lane.engine.post(
            _DERENDER,
            {
                "model": self._lane.engine_model,
                "stream": True,
                "generate_chunk": {"choices": [tokens_only(part, self._request)]},
                "stream_state": self._state,
                "prompt_tokens": len(self._rendered.prompt_ids),
                "prompt_token_ids": self._rendered.prompt_ids[-SEED_TOKENS:],
                **_decoding(self._request),
            },
        )
        with reading():
            self._state = answer["stream_state"]
            choice = answer["chunk"]["choices"][0]
            return text_of(choice["text"]), choice.get("logprobs")

    def recorded(self) -> dict[str, Any]:
        return {"text": self._text}

    def end(self, usage: dict[str, int]) -> list[Event]:
        if not self._request.include_usage:
            return []
        return [(None, {**envelope("text_completion", self._lane, []), "usage": usage})]


def _one_prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        items = cast("list[object]", prompt)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return check_ids(items, "prompt")
        if len(items) == 1:
            return _one_prompt(items[0])
    raise InvalidRequest(
        "`prompt` must be one string or one list of token ids.", hint="send one call per prompt"
    )


def _decoding(request: CallRequest) -> dict[str, Any]:
    """Return the completion request that derender needs to show special tokens."""
    keys = ("skip_special_tokens", "spaces_between_special_tokens")
    decoding = {key: request.body[key] for key in keys}
    # The engine rejects a completion request without a prompt, though derender does not read it.
    return {} if all(decoding.values()) else {"completion_request": {"prompt": [0], **decoding}}
