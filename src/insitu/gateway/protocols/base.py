"""The interface of a client protocol to the call pipeline."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from insitu.errors import InsituError
from insitu.gateway.engines.sample import Generated, Sample
from insitu.gateway.engines.upstream import Engine
from insitu.gateway.protocols.request import CallRequest
from insitu.gateway.shared.counts import Counts
from insitu.gateway.shared.faults import reading
from insitu.gateway.shared.settings import Limits
from insitu.gateway.texts.local_text import Spelling

# Detokenising needs only the last few prompt ids; parsers need all of them.
SEED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the engine will see it."""

    prompt_ids: list[int]
    generate: dict[str, Any]
    """The body of the generate request."""
    from_text: bool = True
    """False if the client chose the ids itself."""
    packed: array[int] | None = None
    """The prompt's ids in 4 bytes each, where they were compared: packing 32k of them takes a millisecond."""

    def sent(self, stream_interval: int | None = None) -> dict[str, Any]:
        """Return the generate request with what concerns its transport alone, so it is not recorded.

        The engine's own text is not read, so the engine makes none unless it looks for stop strings. In a
        stream it sends the first token at once and the others in steps.
        """
        sampling = self.generate["sampling_params"]
        sampling = sampling | {"detokenize": bool(sampling.get("stop"))}
        if stream_interval is not None:
            sampling["stream_interval"] = stream_interval
        return self.generate | {"sampling_params": sampling}


@dataclass(frozen=True, slots=True)
class Lane:
    """The engine, the names and the call id of one attempt."""

    engine: Engine
    engine_model: str
    model_name: str
    """The resolved name that the answer carries."""
    call_id: str
    spelling: Spelling | None = None
    """Of the model's tokenizer; None if the engine must decode every answer."""
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to the client, and the part of it that is recorded."""

    body: dict[str, Any]
    recorded: dict[str, Any]


Event = tuple[str | None, dict[str, Any]]
"""One server-sent event: its name, if the protocol has names, and its data."""


class StreamText(Protocol):
    """Turns tokens into the events of one streamed answer."""

    async def chunk(self, generated: Generated, finished: Sample | None) -> list[Event]:
        """Return the client's events for one generate chunk; `finished` comes with the last one."""
        ...

    def recorded(self) -> dict[str, Any]:
        """Return the whole answer, as it went out."""
        ...

    def end(self, usage: dict[str, int]) -> list[Event]:
        """Return the events after the last chunk: the counts, and whatever marks the answer as complete."""
        ...


_ENGINE_MAX_TOKENS = 16
"""vLLM's default for `SamplingParams.max_tokens`."""


class CallProtocol(Protocol):
    """A client protocol. All but completions are recorded as chat messages."""

    @property
    def name(self) -> str:
        """The recorded name: chat, completions, responses or messages."""
        ...

    @property
    def fields(self) -> frozenset[str]:
        """The fields that a request may have."""
        ...

    @property
    def sends_done(self) -> bool:
        """True if a stream closes with `data: [DONE]`."""
        ...

    def parse(self, body: dict[str, Any], limits: Limits) -> CallRequest: ...

    async def render(self, lane: Lane, request: CallRequest) -> Rendered: ...

    async def answer(
        self, lane: Lane, request: CallRequest, rendered: Rendered, generated: dict[str, Any], sample: Sample
    ) -> Answer: ...

    def stream_text(self, lane: Lane, request: CallRequest, rendered: Rendered) -> StreamText: ...

    def error(self, error: InsituError, num_sent: int = 0, /) -> Event:
        """Return an error in the protocol's own shape; in a stream it follows `num_sent` events."""
        ...


def generate_body(lane: Lane, request: CallRequest, rendered: dict[str, Any]) -> Rendered:
    """Build the generate request from a render answer, with what the record needs."""
    with reading():
        prompt_ids, given = cast("list[int]", rendered["token_ids"]), rendered["sampling_params"]
        sampling: dict[str, Any] = {**given, "n": 1, "logprobs": request.num_logprobs or 0}
        len(prompt_ids)  # reject what is not a list
    sampling.pop("prompt_logprobs", None)
    # The engine omits values that equal its defaults; the record names them all.
    for key in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"):
        sampling.setdefault(key, request.body[key])
    for key in ("repetition_penalty", "min_tokens", "ignore_eos"):
        sampling.setdefault(key, request.body[key])
    # A limit that equals the engine's default is omitted too, and would then count as no limit at all.
    sampling.setdefault("max_tokens", _ENGINE_MAX_TOKENS)
    body = {
        **rendered,
        "request_id": lane.call_id,
        "sampling_params": sampling,
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
    }
    return Rendered(prompt_ids, body)


def usage_of(num_prompt: int, num_output: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def envelope(kind: str, lane: Lane, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the outer object of an answer or a chunk."""
    return {
        "id": lane.call_id,
        "object": kind,
        "created": int(time.time()),
        "model": lane.model_name,
        "choices": choices,
    }


def tokens_only(choice: dict[str, Any], request: CallRequest) -> dict[str, Any]:
    """Return a generated choice as derender takes it, without logprobs that the client did not request."""
    return {
        "index": 0,
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice["token_ids"],
        "logprobs": choice["logprobs"] if request.num_logprobs is not None else None,
    }


class StopTrimmer:
    """Keeps a matched stop string out of the text: derender decodes all tokens, the stop's included.

    While text streams, whatever could still become a stop string is held back.
    """

    def __init__(self, request: CallRequest) -> None:
        self._keep = request.keeps_stop
        self._from_start = not request.body["min_tokens"]
        self._held = ""
        self._reserve = max((len(stop) for stop in request.stops), default=1) - 1

    def feed(self, text: str, finished: Sample | None) -> str:
        """Return the text that may go out now."""
        text = self._held + text
        open_end = max(len(text) - self._reserve, 0)
        cut = open_end if finished is None else self._end(text, finished.stop_reason)
        self._held = text[cut:]
        return text[:cut]

    def _end(self, text: str, stop: int | str | None) -> int:
        if not isinstance(stop, str):
            return len(text)
        # Before `min_tokens` a stop string is ordinary text; only the last one ended the answer then.
        at = text.find(stop) if self._from_start else text.rfind(stop)
        if at < 0:
            return len(text)
        return at + len(stop) if self._keep else at
