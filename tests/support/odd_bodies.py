"""Bodies of registrations, steps and uploads that are nearly valid, drawn by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["run", "g", "", "../x", "\x00", "__proto__", "a" * 65])
)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def mutate(valid: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A valid object with some fields replaced, dropped or added."""
    fields = st.sampled_from([*valid, "surprise"])
    return st.dictionaries(fields, JSON, max_size=3).flatmap(
        lambda changes: st.sets(st.sampled_from(list(valid)), max_size=2).map(
            lambda dropped: {k: v for k, v in {**valid, **changes}.items() if k not in dropped}
        )
    )


RUN = {"name": "fuzz", "base_model": "m", "project": "p", "lora": {"rank": 4}, "engine_args": {"a": 1}}
STEP = {"groups": ["g"], "settings": {"learning_rate": 1e-3}}
TRAJECTORY = {"rollout_id": "r", "reward": 1.0, "ending": "completed", "num_inline_calls": 1, "metadata": {}}
CALL = {
    "prompt_ids": [1, 2, 3],
    "output_ids": [4, 5],
    "logprobs": [-0.5, -1.5],
    "finish_reason": "stop",
    "policy_version": "base",
}
