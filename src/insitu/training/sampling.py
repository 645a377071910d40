"""Recorded sampling settings: the temperature to train at, and those that training cannot undo.

The engine records the log-probability of the distribution that it drew from, after temperature, penalties
and truncation. The trainer divides its logits by the same temperature, so both mean the same distribution.
Everything else in `_UNDONE_BY_NOTHING` is left to the importance weight, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAST_TEMPERATURE = 0.01
"""The engine samples at this temperature when a client asks for a lower one above 0."""
GREEDY = "greedy"
"""Temperature 0, in the list of settings that training cannot undo."""

_UNDONE_BY_NOTHING: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "thinking_token_budget": (),
}
"""Settings that narrow or shift the distribution, with the values that leave it as it is; so does None.

A grammar is not among them: `ModelCall.constrained` marks it.
"""


def temperature_of(sampling: Mapping[str, object]) -> float:
    """Return the temperature to score a call's tokens at; 1 if none is recorded.

    A greedy call (temperature 0) has no distribution to divide towards: the engine records its tokens'
    log-probabilities at temperature 1, and they are trained on as such.
    """
    given = sampling.get("temperature")
    if not isinstance(given, int | float) or given <= 0:
        return 1.0
    return max(float(given), LEAST_TEMPERATURE)


def not_undone(sampling: Mapping[str, object]) -> list[str]:
    """Return the names of a call's settings that training cannot undo."""
    named = [
        name
        for name, neutral in _UNDONE_BY_NOTHING.items()
        if (value := sampling.get(name)) is not None and value not in neutral
    ]
    return [GREEDY, *named] if sampling.get("temperature") == 0 else named


def is_narrowed(sampling: Mapping[str, object]) -> bool:
    """Return True if more than the temperature changed the distribution behind the recorded logprobs."""
    return any(name != GREEDY for name in not_undone(sampling))
