"""The trainer's own figures of the tokens that a step trained on, kept with its checkpoint.

    micro-batches of each rank ── log-probabilities before the first update ──► calls ──► tokens.safetensors

The sampler's log-probabilities are in the records; these are the other side of the comparison. Shape
suffixes: c calls, t their tokens one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from insitu.training.packing import Packing
from insitu.types import TrainingSequence
from insitu.wire.starts.adapter_files import TOKENS

_FORMAT = "1"


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """One step. A call that was not trained on, or whose advantage is 0, is not in it."""

    calls: Sequence[str]
    count_c: NDArray[np.int32]
    """The number of tokens of each call."""
    advantage_c: NDArray[np.float32]
    logprob_t: NDArray[np.float32]
    """The trainer's log-probability before the step's first update."""

    def write(self, directory: Path) -> None:
        """Write them into a checkpoint that is not committed yet."""
        columns = {"count": self.count_c, "advantage": self.advantage_c, "logprob": self.logprob_t}
        metadata = {"format": _FORMAT, "calls": json.dumps(list(self.calls))}
        save_file(columns, directory / TOKENS, metadata=metadata)


def token_figures(packing: Packing, logprobs: Sequence[NDArray[np.float32]]) -> TokenFigures:
    """Give each rank's log-probabilities, in the order of its micro-batches, back to the calls."""
    calls: list[str] = []
    counts: list[int] = []
    advantages: list[float] = []
    kept: list[NDArray[np.float32]] = [np.empty(0, np.float32)]
    for rows, logprob_t in zip(packing.ranks, logprobs, strict=True):
        sequences = [packing.shares[i].sequence for row in rows for i in row.members]
        ends = np.cumsum([sequence.num_trained for sequence in sequences], dtype=np.int64)
        assert len(logprob_t) == (ends[-1] if len(ends) else 0), "one for each token in the loss"
        for sequence, own_t in zip(sequences, np.split(logprob_t, ends), strict=False):
            if not sequence.calls:
                continue
            kept.append(own_t)
            for call, count, advantage in _stretches(sequence):
                calls.append(call)
                counts.append(count)
                advantages.append(advantage)
    return TokenFigures(
        calls, np.array(counts, np.int32), np.array(advantages, np.float32), np.concatenate(kept)
    )


def _stretches(sequence: TrainingSequence) -> Iterator[tuple[str, int, float]]:
    """Yield the call, length and advantage of each stretch in the loss."""
    lengths, advantages = (
        column_s[sequence.trained_s].tolist() for column_s in (sequence.length_s, sequence.advantage_s)
    )
    return zip(sequence.calls, lengths, advantages, strict=True)
