"""Verified samples of the engine: complete ids and logprobs, or an error. Never a doubtful record."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from insitu.errors import UpstreamError
from insitu.gateway.engines.routes import Target
from insitu.gateway.shared.faults import ReplicaFailed, UnexpectedShape, VersionMismatch, reading

_MISSING_LOGPROB = -9999.0  # what vLLM writes where it has no logprob
_MAX_TOKEN_ID = 2**31 - 1
_COMPLETE = ("stop", "length")


class TokenLogprob(TypedDict):
    """One sampled token in a generate answer; it has further fields, which are passed on."""

    token_id: int
    logprob: float


class Logprobs(TypedDict):
    content: list[TokenLogprob] | None


class WeightSpan(TypedDict):
    """The weights that sampled a range of an answer's tokens."""

    version: str


class Usage(TypedDict, total=False):
    prompt_tokens: int
    completion_tokens: int


class GeneratedChoice(TypedDict):
    token_ids: list[int] | None
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    weight_versions: NotRequired[list[WeightSpan] | None]


class GenerateAnswer(TypedDict):
    """vLLM's answer to a generate request, or one chunk of it. Not validated: read it inside `reading`."""

    choices: list[GeneratedChoice]
    model: NotRequired[str | None]
    usage: NotRequired[Usage | None]


@dataclass(slots=True)
class Generated:
    """A generation as it arrives: whole, or chunk by chunk."""

    token_ids: list[int] = field(default_factory=list[int])
    logprob_entries: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightSpan] | None = None
    usage: Usage | None = None
    model: str | None = None

    def add(self, answer: GenerateAnswer) -> None:
        """Add a generate answer or one chunk of it."""
        with reading():
            self.usage = answer.get("usage") or self.usage
            self.model = answer.get("model") or self.model
            for choice in answer["choices"]:
                self.token_ids += choice["token_ids"] or []
                if choice["logprobs"]:
                    self.logprob_entries += choice["logprobs"]["content"] or []
                self.finish_reason = choice["finish_reason"] or self.finish_reason
                self.stop_reason = choice.get("stop_reason") if self.stop_reason is None else self.stop_reason
                self.weight_versions = choice.get("weight_versions") or self.weight_versions

    def after(self, num_tokens: int) -> Generated:
        """Return the part after the first `num_tokens` tokens."""
        return Generated(
            token_ids=self.token_ids[num_tokens:],
            logprob_entries=self.logprob_entries[num_tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """A verified generation."""

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | str | None
    version: str


def verify(generated: Generated, num_prompt_tokens: int, target: Target) -> Sample:
    """Return the verified sample, or raise if it cannot be recorded."""
    if generated.finish_reason not in _COMPLETE:
        raise ReplicaFailed(
            f"the generation ended with `{generated.finish_reason}` instead of a complete answer"
        )
    with reading():
        version = _reported_version(generated, target)
        logprobs = _logprobs(generated, num_prompt_tokens)
    return Sample(
        output_ids=generated.token_ids,
        logprobs=logprobs,
        finish_reason=generated.finish_reason,
        stop_reason=generated.stop_reason,
        version=version,
    )


def partial(generated: Generated, finish_reason: str, target: Target) -> Sample:
    """Return what arrived of a generation that broke off, as far as ids and logprobs agree.

    Nothing is verified, not even the version: it is what the engine had reported, or empty.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    with suppress(UnexpectedShape), reading():
        for token, entry in zip(generated.token_ids, generated.logprob_entries, strict=False):
            logprob = float(entry["logprob"])
            if entry["token_id"] != token or not 0 <= token <= _MAX_TOKEN_ID:
                break
            if not math.isfinite(logprob) or logprob <= _MISSING_LOGPROB:
                break
            ids.append(token)
            logprobs.append(logprob)
    versions: set[str] = set()
    with suppress(UnexpectedShape), reading():
        versions = {str(span["version"]) for span in generated.weight_versions or []}
    said = generated.model if target.is_adapter else "".join(versions) if len(versions) == 1 else None
    return Sample(ids, logprobs, finish_reason, generated.stop_reason, said or "")


def _logprobs(generated: Generated, num_prompt_tokens: int) -> list[float]:
    ids, entries, usage = generated.token_ids, generated.logprob_entries, generated.usage or Usage()
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if counted != (num_prompt_tokens, len(ids)) or not ids:
        raise _unusable(
            f"its usage counts {counted[0]} prompt and {counted[1]} output tokens, but its answer has "
            f"{num_prompt_tokens} and {len(ids)}"
        )
    if len(entries) != len(ids):
        raise _unusable(f"{len(ids)} tokens came with {len(entries)} logprobs")
    logprobs = [float(entry["logprob"]) for entry in entries]
    for position, (token, entry, logprob) in enumerate(zip(ids, entries, logprobs, strict=True)):
        if entry["token_id"] != token or not 0 <= token <= _MAX_TOKEN_ID:
            raise _unusable(f"token {token} at {position} has the logprob of token {entry['token_id']}")
        if not math.isfinite(logprob) or logprob <= _MISSING_LOGPROB:
            raise _unusable(f"the logprob of token {token} at {position} is {logprob}")
    return logprobs


def _reported_version(generated: Generated, target: Target) -> str:
    """Return the version that the engine itself reports for these tokens.

    Full weights are named by `weight_versions`; an adapter by `model`, which only whole answers carry. A
    stream can be trusted because the engine rejects names that it has not loaded.
    """
    spans = generated.weight_versions or []
    versions = sorted({str(span["version"]) for span in spans})
    if len(versions) != 1:
        said = " and ".join(versions) or "no weights"
        raise VersionMismatch(f"the engine reports {said} for one answer of `{target.name}`")
    reported = (generated.model or target.engine_model) if target.is_adapter else versions[0]
    if target.version is not None and reported != target.version:
        raise VersionMismatch(
            f"`{target.name}` should be `{target.version}`, but the engine reports `{reported}`"
        )
    return reported


def _unusable(why: str) -> UpstreamError:
    return UpstreamError(
        f"The engine's answer cannot be recorded: {why}.", hint="check the engine's version and flags"
    )
