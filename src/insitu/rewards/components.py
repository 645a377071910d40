"""Register the built-in rewards: importing this module does it."""

from insitu.rewards import exact_match, function_evaluator, json_schema, numeric, regex_match, weighted

__all__ = ["exact_match", "function_evaluator", "json_schema", "numeric", "regex_match", "weighted"]
