"""The components of this room: importing this module registers them."""

from insitu.evaluation import (
    custom_dataset,
    exact_match,
    file_dataset,
    function_evaluator,
    group_judge,
    json_schema,
    llm_judge,
    numeric,
    regex_match,
    weighted,
)

__all__ = [
    "custom_dataset",
    "exact_match",
    "file_dataset",
    "function_evaluator",
    "group_judge",
    "json_schema",
    "llm_judge",
    "numeric",
    "regex_match",
    "weighted",
]
