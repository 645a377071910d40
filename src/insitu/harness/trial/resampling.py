"""Resampling: go on from recorded token ids, with the base model or a kept step of the run.

It happens in a process of its own (`child`), which finds the backend's address and key in the configuration.
The gateway gets ids and is asked for its record of them: nothing is tokenised on the way.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.config.load import load_config
from insitu.errors import DeadlineExceeded, InsituError, InvalidRequest, UpstreamError
from insitu.gateway_client import GatewayClient
from insitu.harness.assembly import Assembly, bind_llms
from insitu.harness.compared_model import check_base
from insitu.harness.gateway_check import served_models
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.trial.child import ChildRequest, answer, ask
from insitu.wire.answers import error_body, to_error
from insitu.wire.bodies import ContinuedIds
from insitu.wire.message import encode
from insitu.wire.transport import ONCE

_KEPT = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
)
"""Sampling parameters that stay. Penalties on the answer alone would begin again at the fork."""
_MARGIN_SECONDS = 5.0
"""The process says by itself what was late, before it is ended."""


class NextToken(BaseModel):
    """The token that a sibling sampled after the same ids."""

    model_config = ConfigDict(frozen=True)

    id: int
    logprob: float
    version: str
    """The weights that sampled it."""


class ResampleRequest(ChildRequest):
    """Ids to go on from, and who is to do it."""

    config_file: str
    run: str
    """The run's name on its backend, as its directory keeps it."""
    step: int | None
    """None: the base model."""
    prompt_ids: list[int]
    sampling: dict[str, Any]
    """Of the recorded call that went on from here."""
    count: int
    max_tokens: int
    next_tokens: list[NextToken] = Field(default_factory=list[NextToken])
    """Sampled freely after these ids; empty if the distribution was masked or truncated."""


class Continuation(BaseModel):
    """One answer, as the gateway recorded it."""

    model_config = ConfigDict(frozen=True)

    call_id: str
    output_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str
    """As a client receives it: without special tokens and stops."""
    pieces: list[str] | None
    """The text of each token; None if the gateway does not know the tokenizer."""


class ResampleAnswer(BaseModel):
    """The continuations, or why there are none."""

    model_config = ConfigDict(frozen=True)

    model: str = ""
    """The name that was called."""
    version: str = ""
    """The weights, as the engine reports them."""
    continuations: list[Continuation] = Field(default_factory=list[Continuation])
    score_gap: float | None = None
    """The largest difference between the recorded and the present score of a next token; None without two
    of them that the same weights sampled."""
    problem: str | None = None
    """An error, as JSON that is sent over HTTP."""
    status: int = 500


def resample(request: ResampleRequest) -> ResampleAnswer:
    """Sample in a new process; raise InsituError if that fails or takes longer than `request.seconds`."""
    found = ask(
        "resampling",
        request,
        ResampleAnswer,
        late="there were no continuations",
        by_hand="see whether the backend is busy: insitu runs list",
    )
    if found.problem is not None:
        raise to_error(found.status, found.problem.encode())
    return found


async def sample(request: ResampleRequest) -> ResampleAnswer:
    """Have the step served, sample, and read the record; all of it within the time limit."""
    doing = ["reading the configuration"]
    try:
        async with asyncio.timeout(request.seconds - _MARGIN_SECONDS):
            return await _sample(request, doing)
    except TimeoutError:
        raise DeadlineExceeded(
            f"no continuations within {request.seconds - _MARGIN_SECONDS:g} s: still {doing[-1]}",
            hint="wait until the backend is less busy, or ask for fewer and shorter ones",
        ) from None


async def _sample(request: ResampleRequest, doing: list[str]) -> ResampleAnswer:
    async with Assembly(load_config(request.config_file)) as parts:
        adapter = await parts.adapter()
        trained = adapter.trained_model
        if trained.name != request.run:
            raise InvalidRequest(
                f"{request.config_file} trains the run {trained.name!r}, but these rollouts are of "
                f"{request.run!r}",
                hint="start insitu view with the configuration of this run",
            )
        if request.step is None:
            check_base(trained)
        binding = bind_llms(parts.config, trained)
        doing.append("looking for the backend")
        await adapter.check()
        doing.append(f"waiting until the backend serves step {request.step or 0}")
        async with (
            adapter.leased(request.step or 0) as model,
            GatewayClient(
                binding.gateway_urls, binding.api_key, retry=ONCE, request_seconds=request.seconds
            ) as gateway,
        ):
            if model is None:
                raise _unserved(adapter, request.step or 0)
            await served_models(gateway, binding, trained)
            doing.append(f"sampling {request.count} answers of at most {request.max_tokens} tokens")
            return await _continued(gateway, model, request)


async def _continued(gateway: GatewayClient, model: str, request: ResampleRequest) -> ResampleAnswer:
    rollout_id = f"view-{secrets.token_hex(8)}"
    kept = {name: request.sampling[name] for name in _KEPT if request.sampling.get(name) is not None}
    asked = ContinuedIds(
        model=model, prompt=request.prompt_ids, n=request.count, max_tokens=request.max_tokens, **kept
    )
    await gateway.continue_ids(rollout_id, asked)
    calls = await _recorded(gateway, rollout_id, request.prompt_ids, request.count)
    version = calls[0]["policy_version"]
    return ResampleAnswer(
        model=model,
        version=version,
        continuations=[
            Continuation(
                call_id=call["id"],
                output_ids=call["output_ids"],
                logprobs=call["logprobs"],
                finish_reason=call["finish_reason"],
                text=str(call["answer"]["text"]),
                pieces=call.get("output_pieces"),
            )
            for call in calls
        ],
        score_gap=await _score_gap(
            gateway,
            asked,
            [each for each in request.next_tokens if _weights(each.version) == _weights(version)],
        ),
    )


def _weights(version: str) -> str:
    """Return a version without the number of times that the engine has loaded it: `run@1#2` is `run@1`."""
    return version.partition("#")[0]


async def _recorded(
    gateway: GatewayClient, rollout_id: str, prompt_ids: Sequence[int], count: int
) -> list[dict[str, Any]]:
    """Read the calls of a rollout, and make sure that they began with these very ids."""
    calls = (await gateway.rollout_record(rollout_id, pieces=True)).calls
    for call in calls:
        if call["prompt_ids"] != list(prompt_ids):
            raise UpstreamError(
                f"call {call['id']} did not go on from the {len(prompt_ids)} ids that were sent: the gateway "
                f"recorded {len(call['prompt_ids'])} others",
                hint="report this: nothing is shown that was not sampled from the fork",
            )
    if len(calls) != count or len({call["policy_version"] for call in calls}) != 1:
        raise UpstreamError(
            f"the gateway recorded {len(calls)} answers by {len({c['policy_version'] for c in calls})} "
            f"versions; {count} by one were asked for",
            hint="try again",
        )
    return calls


async def _score_gap(
    gateway: GatewayClient, asked: ContinuedIds, tokens: Sequence[NextToken]
) -> float | None:
    """Score next tokens of the record again, after the same ids and by the same weights.

    The engine chooses among them alone and reports the likelihood of its choice among them. The recorded
    log-probabilities imply that likelihood; after other ids it would be another one.
    """
    recorded = {token.id: token.logprob for token in tokens}
    if len(recorded) < 2:
        return None
    rollout_id = f"view-{secrets.token_hex(8)}"
    one = replace(asked, n=1, max_tokens=1, allowed_token_ids=sorted(recorded))
    await gateway.continue_ids(rollout_id, one)
    (call,) = await _recorded(gateway, rollout_id, asked.prompt, 1)
    (chosen,), (logprob,) = call["output_ids"], call["logprobs"]
    most = max(recorded.values())
    together = most + math.log(math.fsum(math.exp(each - most) for each in recorded.values()))
    return abs(recorded[chosen] - together - logprob)


def _unserved(adapter: TrainerAdapter, step: int) -> InvalidRequest:
    return InvalidRequest(
        f"{type(adapter).__qualname__} cannot serve step {step}: only the newest one",
        hint="give it a method `leased` (docs/plugins.md)",
    )


async def _answered(request: ResampleRequest) -> ResampleAnswer:
    try:
        return await sample(request)
    except InsituError as error:
        return ResampleAnswer(problem=encode(error_body(error)).decode(), status=error.status)


def main() -> None:
    """Answer one request."""
    answer(ResampleRequest, _answered)


if __name__ == "__main__":
    main()
