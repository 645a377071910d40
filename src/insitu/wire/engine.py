"""Requests to a vLLM server and the parts of its answers that are read. The protocol is vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.wire.message import Answer, Malformed, Message
from insitu.wire.values import Count

MAX_LORAS = 4
"""Different adapters that an engine computes in one batch, unless set. With one, a new version would wait
until the old one has drained."""


@dataclass(frozen=True, slots=True)
class LoadAdapter(Message):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter(Message):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str


@dataclass(frozen=True, slots=True)
class WeightsPath(Message):
    """The directory of the new weights, on the engine's machine."""

    weights_path: str


@dataclass(frozen=True, slots=True)
class ReloadWeights(Message):
    """`POST /collective_rpc`: each worker reloads its weights."""

    kwargs: WeightsPath
    method: str = "reload_weights"


@dataclass(frozen=True, slots=True)
class AdapterDirectory(Message):
    """An adapter's directory, on the engine's machine."""

    directory: str


@dataclass(frozen=True, slots=True)
class FindLeftOut(Message):
    """`POST /collective_rpc`: each worker names the tensors of an adapter that it does not compute with."""

    kwargs: AdapterDirectory
    method: str = "tensors_left_out"


@dataclass(frozen=True, slots=True)
class LeftOut(Answer):
    """The answer, a list for each worker."""

    results: list[list[str]]


@dataclass(frozen=True, slots=True)
class NewVersion(Message):
    """`POST /update_weight_version`."""

    new_version: str


@dataclass(frozen=True, slots=True)
class EngineState(Answer):
    """The answer to `POST /wake_up`: `awake` once all memory is back, else `sleeping`."""

    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Message):
    """`POST /v1/completions` on token ids. None means that the engine's default applies."""

    model: str
    prompt: list[list[int]]
    max_tokens: Count
    temperature: float | None = None
    logprobs: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None

    OPTIONAL = ("temperature", "logprobs", "ignore_eos", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class TokenLogprob(Answer):
    """The log-probability of one token of a prompt."""

    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredPrompt(Answer):
    """One choice of a completion, with the scores of its prompt by token id; the first token has none."""

    index: Count
    prompt_logprobs: list[dict[str, TokenLogprob] | None]

    def scores_of(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token from the second on; raise Malformed if one has none."""
        if len(self.prompt_logprobs) != len(ids):
            raise Malformed(f"{len(self.prompt_logprobs)} tokens are scored, {len(ids)} were sent")
        scores: list[float] = []
        for place, (row, token) in enumerate(zip(self.prompt_logprobs[1:], ids[1:], strict=True), 1):
            if row is None or str(token) not in row:
                found = ", ".join(sorted(row or {})[:3]) or "nothing"
                raise Malformed(f"token {token} at place {place} is not scored, but {found}")
            scores.append(row[str(token)].logprob)
        return scores


@dataclass(frozen=True, slots=True)
class ScoredPrompts(Answer):
    """The answer to a completion with `prompt_logprobs`."""

    choices: list[ScoredPrompt]


@dataclass(frozen=True, slots=True)
class EngineModel(Answer):
    """A name that the engine answers to."""

    id: str


@dataclass(frozen=True, slots=True)
class EngineModels(Answer):
    """`GET /v1/models`."""

    data: list[EngineModel]
