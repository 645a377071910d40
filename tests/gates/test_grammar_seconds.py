"""The gateway's estimate of a grammar's compilation is no lower than what xgrammar takes.

The vocabulary is made up, of the size of a small model's. The machine is measured by the same compiler: by a
string of at most 200 characters, whose estimate is known.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import xgrammar

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.grammars import check_grammars
from insitu.gateway.shared.settings import Limits

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789 {}[]",:_-'
VOCABULARY_SIZE = 49_152
NOISE_SECONDS = 0.3
Compile = Callable[[dict[str, Any]], float]
Schema = dict[str, Any]


def required(*schemas: Schema) -> Schema:
    properties = {f"p{number}": schema for number, schema in enumerate(schemas)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def pattern(*texts: str) -> Schema:
    return required(*({"type": "string", "pattern": text} for text in texts))


def of_length(*counts: int) -> Schema:
    return required(*({"type": "string", "maxLength": count} for count in counts))


@pytest.fixture(scope="module")
def compiled() -> Compile:
    words = itertools.chain(
        map(chr, range(32, 127)), *(itertools.product(CHARACTERS, repeat=n) for n in (2, 3))
    )
    tokens = ["".join(word) for word in itertools.islice(words, VOCABULARY_SIZE - 1)]
    vocabulary = xgrammar.TokenizerInfo([*tokens, "</s>"], stop_token_ids=[VOCABULARY_SIZE - 1])

    def compiled(schema: Schema) -> float:
        compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        started = time.thread_time()
        compiler.compile_grammar(xgrammar.Grammar.from_json_schema(json.dumps(schema)))
        return time.thread_time() - started

    return compiled


def speed_of(compiled: Compile) -> float:
    """Return the speed of this machine beside the one of the estimates."""
    return compiled(of_length(200)) / 1.82


@pytest.fixture(scope="module")
def machine(compiled: Compile) -> float:
    return speed_of(compiled)


def is_within(compiled: Compile, schema: Schema, machine: float) -> bool:
    """Compare with the estimate; if a neighbour slowed the machine meanwhile, with its speed of now."""
    if compiled(schema) <= machine * estimated(schema) * 1.3 + NOISE_SECONDS:
        return True
    return compiled(schema) <= speed_of(compiled) * estimated(schema) * 1.3 + NOISE_SECONDS


def estimated(schema: Schema) -> float:
    """Return the estimate, which the gateway only tells where it rejects."""
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    low, high = 0.0, 100.0
    while high - low > 0.01:
        seconds = (low + high) / 2
        try:
            check_grammars({"response_format": wanted}, Limits(max_grammar_seconds=seconds))
            high = seconds
        except InvalidRequest:
            low = seconds
    return high


SLOW: dict[str, Schema] = {
    "one string": of_length(10_000),
    "strings": of_length(128, 60, 30),
    "optional characters": pattern("[a-z]?" * 48),
    "stars": pattern("[a-z]*" * 100),
    "patterns": pattern("[a-z]?" * 16, "[0-9]?" * 16),
    "counted": pattern("[a-z]{0,3}" * 12),
    "counted far": pattern(".{0,2000}"),
    "ranges": pattern(".{0,40}" * 2),
    "formats": required(*({"type": "string", "format": "uri-template"} for _ in range(8))),
    "optional properties": {"type": "object", "properties": {f"p{n}": {} for n in range(400)}},
    "bounded numbers": required(
        *({"type": "number", "minimum": n + 0.12345, "maximum": 10**9 - n} for n in range(100))
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SLOW)
def test_the_estimate_is_no_lower_than_the_compilation(name: str, compiled: Compile, machine: float) -> None:
    assert is_within(compiled, SLOW[name], machine)


@pytest.mark.timeout(120)
def test_neither_is_that_of_random_patterns(compiled: Compile, machine: float) -> None:
    chance = random.Random(7)
    pieces = ["a", "[a-z]", "(a|bc)", r"\d", ".", "(x[0-9]?)"]
    repeats = ["", "", "?", "*", "+", "{2,5}", "{3}", "{0,20}", "{2,}"]
    for _ in range(40):
        text = "".join(chance.choice(pieces) + chance.choice(repeats) for _ in range(chance.randint(2, 14)))
        schema = pattern(text)
        seconds = estimated(schema)
        if seconds < 4:
            assert is_within(compiled, schema, machine), text
