"""Register the built-in rewards: importing this module does it."""

from insitu.rewards import (
    command_evaluator,
    exact_match,
    function_evaluator,
    json_schema,
    numeric,
    regex_match,
    weighted,
)

__all__ = [
    "command_evaluator",
    "exact_match",
    "function_evaluator",
    "json_schema",
    "numeric",
    "regex_match",
    "weighted",
]
