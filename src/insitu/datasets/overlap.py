"""Overlap: validation examples that are also trained on."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from insitu.datasets.example import Example


def overlap_note(training: Sequence[Example], validation: Sequence[Example]) -> str | None:
    """Return a warning if validation examples have the input of training examples; None if none has."""
    trained = {_key(example) for example in training}
    shared = sum(_key(example) in trained for example in validation)
    if not shared:
        return None
    return (
        f"{shared} of {len(validation)} validation examples are also trained on: "
        "their reward does not show what the model does with new ones"
    )


def _key(example: Example) -> bytes:
    return orjson.dumps(example.input, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
