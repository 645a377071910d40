"""Importing this module registers the components of this package."""

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
