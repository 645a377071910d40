"""The probe: do the engines now compute what the trainer computes?

Fixed sequences of the run are scored by trainer and engine before the step (t₀, s₀) and, after publication,
by both again (t₁, s₁). Two figures decide:

- ``mean_abs`` = mean |s₁ − t₁|: sampler and trainer must agree up to their precision;
- ``moved`` = ‖s₁ − s₀‖ / ‖t₁ − t₀‖: an engine that kept its weights has not moved at all, however small the
  step was, because its own rounding cancels.

A third, ``applied`` = ⟨s₁ − s₀, t₁ − t₀⟩ / ‖t₁ − t₀‖², is the share of the trainer's change that the engine
shows. Merged weights of 16 bits are rounded without bias, with new random numbers at every step: the share
scatters around 1 there, the more the smaller the change.

On a GPU the same engine scores the same tokens slightly differently each time. So the old weights are scored
twice, and the difference is the engine's noise: ``moved`` counts only what exceeds twice the noise, and an
engine whose ``applied`` is beyond doubt has moved as well. Noise does not point in the direction of the
trainer's change, so over many tokens ``applied`` tells a change that is smaller than the noise of one token.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from insitu.errors import ProbeFailed
from insitu.system.durable import write_atomic
from insitu.types import TrainingSequence

Rows = Sequence[Sequence[float]]
"""Log-probabilities of each fixed sequence's tokens from the second on."""

_log = logging.getLogger(__name__)
_SEQUENCES = TypeAdapter(list[list[int]])
_NUM_SEQUENCES = 6
_MAX_TOKENS = 96
_LEAST_MOVED = 0.1
_NOISE_ALLOWANCE = 2.0
_DEVIATIONS = 4.0


@dataclass(frozen=True, slots=True)
class Noise:
    """|Δlogprob| per token between two scorings of the same sequences under the same weights."""

    mean_abs: float = 0.0
    max_abs: float = 0.0
    rms: float = 0.0


NO_NOISE = Noise()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One engine's figures after a publication."""

    mean_abs: float
    max_abs: float
    moved: float | None
    """None when the trainer's own scores did not change."""
    applied: float | None
    num_tokens: int
    noise: Noise = NO_NOISE
    update: float | None = None
    """Mean |Δlogprob| of the trainer's own scores: how much the step has changed the model."""
    doubt: float = 0.0
    """Four standard deviations of the part of `applied` that is noise."""

    @property
    def can_tell(self) -> bool:
        """True if an engine with the old weights can be told from one with the new ones."""
        return self.moved is not None and self.doubt <= _LEAST_MOVED

    @property
    def has_moved(self) -> bool:
        """True if the engine shows a tenth or more of the trainer's change."""
        return max(self.moved or 0.0, self.applied or 0.0) >= _LEAST_MOVED

    def metrics(self) -> dict[str, float]:
        values = {"probe/mean_abs": self.mean_abs, "probe/max_abs": self.max_abs}
        values |= {"probe/noise": self.noise.mean_abs, "probe/can_tell": float(self.can_tell)}
        if self.update is not None:
            values["probe/update"] = self.update
        if self.moved is not None and self.applied is not None:
            values |= {"probe/moved": self.moved, "probe/applied": self.applied}
        return values


@dataclass(frozen=True, slots=True)
class Baseline:
    """A run's fixed sequences with the trainer's and the engines' scores at one step."""

    step: int
    fixed: list[list[int]]
    trainer: list[list[float]]
    engines: dict[int, list[list[float]]]
    """Keyed by incarnation: a restarted engine counts as a new one."""
    noise: dict[int, Noise] = field(default_factory=dict[int, Noise])
    """Keyed likewise; an engine without an entry counts as free of noise."""


def probe_sequences(path: Path, batch: Sequence[TrainingSequence]) -> list[list[int]]:
    """Return the run's fixed sequences: chosen from its first batch, kept in `path`, never changed.

    Empty until a batch has a sequence to train on: before that, nothing has changed that could be probed.
    """
    if (kept := _kept(path)) is not None:
        return kept
    if not batch:
        return []
    moving = [sequence for sequence in batch if sequence.advantage_s.any()] or list(batch)
    stride = max(1, len(moving) // _NUM_SEQUENCES)
    chosen = [sequence.token_ids[:_MAX_TOKENS].tolist() for sequence in moving[::stride][:_NUM_SEQUENCES]]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(chosen).encode())
    return chosen


def _kept(path: Path) -> list[list[int]] | None:
    """Return what the file holds; None if there is none, or it is damaged and set aside."""
    try:
        return _SEQUENCES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        aside = path.replace(path.with_suffix(".damaged"))
        _log.error("%s cannot be read and is %s now: %s", path, aside.name, str(error).splitlines()[0])
        return None


def noise_of(first: Rows, second: Rows) -> Noise:
    """Measure an engine's noise from two scorings under the same weights."""
    gaps = [abs(y - x) for x, y in zip(_flat(first), _flat(second), strict=True)]
    if not gaps:
        return NO_NOISE
    rms = math.sqrt(math.fsum(gap * gap for gap in gaps) / len(gaps))
    return Noise(math.fsum(gaps) / len(gaps), max(gaps), rms)


def compare(
    trainer_before: Rows,
    trainer_after: Rows,
    engine_before: Rows,
    engine_after: Rows,
    noise: Noise = NO_NOISE,
) -> ProbeResult:
    """Compute the figures of the module's docstring over all tokens."""
    t0, t1, s0, s1 = map(_flat, (trainer_before, trainer_after, engine_before, engine_after))
    gaps = [abs(x - y) for x, y in zip(s1, t1, strict=True)]
    change = [y - x for x, y in zip(t0, t1, strict=True)]
    energy = math.fsum(d * d for d in change)
    mean_abs, max_abs = math.fsum(gaps) / max(1, len(gaps)), max(gaps, default=0.0)
    update = math.fsum(map(abs, change)) / len(change) if change else None
    if energy == 0.0:
        return ProbeResult(mean_abs, max_abs, None, None, len(gaps), noise, update)
    shown = [y - x for x, y in zip(s0, s1, strict=True)]
    applied = math.fsum(a * d for a, d in zip(shown, change, strict=True)) / energy
    by_noise = len(shown) * (_NOISE_ALLOWANCE * noise.rms) ** 2
    moved = math.sqrt(max(0.0, math.fsum(a * a for a in shown) - by_noise) / energy)
    doubt = _DEVIATIONS * noise.rms / math.sqrt(energy)
    return ProbeResult(mean_abs, max_abs, moved, applied, len(gaps), noise, update, doubt)


def judge(
    result: ProbeResult, threshold: float, engine: str, version: str, *, must_move: bool = True
) -> None:
    """Raise ProbeFailed if the engine disagrees with the trainer or, after an update, has not moved.

    The engine's own noise adds to the threshold, at most doubling it: an engine that answers at random has a
    large noise as well. A change that is lost in the noise fails no step.
    """
    tolerated = threshold + min(result.noise.mean_abs, threshold)
    if not result.mean_abs <= tolerated:  # NaN fails too
        own = f" ({result.noise.mean_abs:.4g} is the engine's own noise)" if result.noise.mean_abs else ""
        raise ProbeFailed(
            f"after publishing {version}, {engine} and the trainer disagree: mean |Δlogprob| "
            f"{result.mean_abs:.4g} over {result.num_tokens} tokens, tolerated {tolerated:.4g}{own}",
            hint="the sampler does not run the trained weights; see the replica's log, or --probe-threshold",
        )
    if must_move and result.can_tell and not result.has_moved:
        raise ProbeFailed(
            f"after publishing {version}, {engine} still answers with the old weights: its logprobs moved by "
            f"{result.moved:.2g} of the trainer's change",
            hint="publication did not reach the sampler: see the replica's log",
        )


def _flat(rows: Rows) -> list[float]:
    return [x for row in rows for x in row]
