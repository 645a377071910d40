"""The components of this room: importing this module registers them."""

from insitu.evaluation import (
    custom_dataset,
    exact_match,
    file_dataset,
    function_evaluator,
    json_schema,
    numeric,
    regex_match,
)

__all__ = [
    "custom_dataset",
    "exact_match",
    "file_dataset",
    "function_evaluator",
    "json_schema",
    "numeric",
    "regex_match",
]
