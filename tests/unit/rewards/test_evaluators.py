"""Evaluators that need no model."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from pydantic import ValidationError

from insitu import plugins
from insitu.errors import InvalidRequest
from insitu.plugins import ComponentConfig, Kind
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.numeric import last_number
from insitu.rewards.registered import register_evaluator
from insitu.rewards.score import score_group, score_item

ENDLESS = "^(a|aa)+$"
"""Backtracks without end on many a's that something else follows."""


def item(output, expected="4", **more):
    return EvalItem("a", "2+2", expected, output, **more)


async def score(evaluator, output, expected="4"):
    result = await score_item(evaluator, item(output, expected), 5)
    assert (result.score is None) != (result.error is None)
    return result.error if result.score is None else result.score


@pytest.mark.parametrize(
    ("fields", "output", "expected", "right"),
    [
        ({}, " 4\n", "4", 1),
        ({}, 4, "4", 1),
        ({}, 4.0, 4, 1),
        ({}, "Paris", "paris", 0),
        ({"ignore_case": True}, "STRASSE", "straße", 1),
        ({"strip": False}, " 4", "4", 0),
        ({}, {"b": 1, "a": [True]}, {"a": [True], "b": 1}, 1),
        ({}, {"a": True}, {"a": 1}, 0),
        ({}, None, "4", 0),
        ({}, "", "", 1),
    ],
)
async def test_exact_match(evaluator, fields, output, expected, right):
    assert await score(evaluator("exact_match", **fields), output, expected) == right


@pytest.mark.parametrize("type_name", ["exact_match", "numeric"])
async def test_without_expected_answer_there_is_no_score(evaluator, type_name):
    assert "has no expected answer" in await score(evaluator(type_name), "4", None)


@pytest.mark.parametrize(
    ("fields", "output", "right"),
    [
        ({"pattern": r"\d"}, "a4", 1),
        ({"pattern": r"\d"}, "a", 0),
        ({"pattern": r"<move>(\d)</move>", "group": 1, "compare": "equals_expected"}, "<move>4</move>", 1),
        ({"pattern": r"<move>(\d)</move>", "group": 1, "compare": "equals_expected"}, "<move>5</move>", 0),
        ({"pattern": r"(?P<n>\d)|x", "group": "n"}, "x", 0),
        ({"pattern": r"\s*\d\s*", "compare": "equals_expected"}, " 4 ", 1),
        ({"pattern": r"(?r)\d", "compare": "equals_expected"}, "first 3, then 4", 1),
        ({"pattern": "n.+4"}, {"n": 4}, 1),
    ],
)
async def test_regex_match(evaluator, fields, output, right):
    assert await score(evaluator("regex_match", **fields), output) == right


async def test_a_pattern_without_end_is_an_error_and_the_loop_goes_on(evaluator):
    slow = evaluator("regex_match", pattern=ENDLESS, timeout_seconds=0.3)
    task = asyncio.create_task(score(slow, "a" * 60 + "!"))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert "searched 61 characters for longer than 0.3 s" in await task
    assert ticks > 5


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"pattern": "("}, "missing"),
        ({"pattern": "a", "group": 1}, "has 0 groups"),
        ({"pattern": "a", "group": "n"}, "no group called 'n'"),
        ({"pattern": "a", "compare": "equals"}, "Input should be"),
        ({}, "Field required"),
    ],
)
def test_a_bad_pattern_is_refused_at_once(evaluator, fields, complaint):
    with pytest.raises(ValidationError, match=complaint):
        evaluator("regex_match", **fields)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3-4", 4),
        ("x = -4", -4),
        ("a−7, b \N{MINUS SIGN}7", -7),
        ("1,234,567.5 apples", 1234567.5),
        ("1,2345", 2345),
        ("so it is $5.", 5),
        ("-.5e3", -500),
        (r"\boxed{42}", 42),
        ("none", None),
        ("", None),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("fields", "output", "expected", "right"),
    [
        ({}, "2 + 2 is 4", "4", 1),
        ({}, "4 or 5", "4", 0),
        ({}, 4.0, "#### 4", 1),
        ({}, "no idea", "4", 0),
        ({}, None, "4", 0),
        ({}, True, 1, 0),
        ({}, "9007199254740993", 9007199254740992, 0),
        ({}, "1e999999999", 4, 0),
        ({"tolerance": 0.1}, "0.3", "0.2", 1),
        ({"tolerance": 0.1}, "0.31", "0.2", 0),
        ({"relative_tolerance": 0.01}, "101", "100", 1),
        ({"relative_tolerance": 0.01}, "-101", "-100", 1),
        ({"relative_tolerance": 0.01}, "102", "100", 0),
        ({"relative_tolerance": 0.5}, "0.1", "0", 0),
    ],
)
async def test_numeric(evaluator, fields, output, expected, right):
    assert await score(evaluator("numeric", **fields), output, expected) == right


async def test_numeric_needs_a_number_to_compare_with(evaluator):
    assert "contains no number" in await score(evaluator("numeric"), "4", "four")
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            evaluator("numeric", tolerance=wrong)


SCHEMA = {"type": "object", "required": ["move"], "properties": {"move": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ('{"move": 4}', 1),
        ({"move": 4}, 1),
        ('{"move": "4"}', 0),
        ('```json\n{"move": 4}\n```', 0),
        ('{"move": NaN}', 0),
        ("[" * 100_000, 0),
        ("", 0),
        (None, 0),
    ],
)
async def test_json_schema(evaluator, output, right):
    assert await score(evaluator("json_schema", schema=SCHEMA), output) == right


async def test_json_schema_says_what_is_wrong(evaluator):
    result = await score_item(evaluator("json_schema", schema=SCHEMA), item({"move": "x"}), 5)
    assert result.reasoning == {"problem": "$.move: 'x' is not of type 'integer'"}


async def test_json_schema_from_a_file(evaluator, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "array"}')
    assert await score(evaluator("json_schema", schema_file=path), "[]") == 1
    path.write_text("{")
    with pytest.raises(InvalidRequest, match=r"schema\.json is not JSON"):
        evaluator("json_schema", schema_file=path)
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        evaluator("json_schema", schema_file=tmp_path / "none.json")


def test_a_bad_schema_is_refused_at_once(evaluator):
    with pytest.raises(InvalidRequest, match=r"the schema is wrong at \$\.type"):
        evaluator("json_schema", schema={"type": "objekt"})
    with pytest.raises(InvalidRequest, match="both patternProperties and unevaluatedProperties"):
        evaluator(
            "json_schema", schema={"allOf": [{"patternProperties": {}}], "unevaluatedProperties": False}
        )
    for wrong in ({}, {"schema": {}, "schema_file": "x"}):
        with pytest.raises(ValidationError, match="either schema or schema_file"):
            evaluator("json_schema", **wrong)


@pytest.mark.parametrize(
    ("schema", "output", "right"),
    [
        ({"pattern": "^a+$"}, '"aaa"', 1),
        ({"pattern": "^a+$"}, '"ab"', 0),
        ({"patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False}, {"n_a": 1}, 1),
        ({"patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False}, {"n_a": "1"}, 0),
        ({"patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False}, {"m": 1}, 0),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, {"a": 1, "b": "x"}, 1),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, {"a": 1, "b": 2}, 0),
        ({"additionalProperties": False}, [1], 1),
    ],
)
async def test_json_schema_patterns(evaluator, schema, output, right):
    assert await score(evaluator("json_schema", schema=schema), output) == right


@pytest.mark.parametrize(
    ("schema", "output"),
    [
        ({"pattern": ENDLESS}, '"' + "a" * 60 + '!"'),
        ({"patternProperties": {ENDLESS: {}}}, {"a" * 60 + "!": 1}),
        (
            {"patternProperties": {ENDLESS: {}}, "additionalProperties": False},
            {"a" * 60 + "!": 1},
        ),
    ],
)
async def test_json_schema_patterns_have_a_time_limit(evaluator, monkeypatch, schema, output):
    monkeypatch.setattr("insitu.rewards.json_schema._PATTERN_SECONDS", 0.1)
    assert "for longer than 0.1 s" in await score(evaluator("json_schema", schema=schema), output)


async def test_json_schema_fetches_nothing(evaluator):
    asked: list[str] = []

    class Schemas(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Schemas) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        remote = evaluator("json_schema", schema={"$ref": f"http://127.0.0.1:{server.server_port}/s.json"})
        found = await score(remote, "{}")
        server.shutdown()
    assert asked == []
    assert "Unresolvable" in found


MODULE = """
import asyncio, time
from insitu.rewards.items import EvalResult

def plain(item, bonus=0.0): return float(item.output == item.expected) + bonus
async def later(item):
    await asyncio.sleep(0)
    return EvalResult(item.id, 0.5, "because")
class Callable:
    async def __call__(self, item): return 0.75
instance = Callable()
def hands_on(item): return later(item)
def fails(item): raise KeyError("colour")
def text(item): return "7"
def nothing(item): pass
def leaves(item): raise SystemExit(3)
def hangs(item): time.sleep(30)
def yields(item): yield 1.0
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_rewards_module.py").write_text(MODULE)
    importlib.invalidate_caches()
    yield "my_rewards_module"
    sys.modules.pop("my_rewards_module", None)


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        ("plain", {}, 1.0),
        ("plain", {"bonus": 0.5}, 1.5),
        ("later", {}, 0.5),
        ("instance", {}, 0.75),
        ("hands_on", {}, 0.5),
        ("fails", {}, "KeyError: 'colour'"),
        ("text", {}, "TypeError: the score is a str, not a number: '7'"),
        ("nothing", {}, "ValueError: the evaluator returned no score"),
        ("leaves", {}, "RuntimeError: the function called sys.exit(3)"),
    ],
)
async def test_python(evaluator, module, function, args, result):
    found = await score(evaluator("python", entry=f"{module}:{function}", args=args), "4")
    assert found == result if isinstance(result, float) else str(found).startswith(result)


async def test_a_function_that_hangs_is_an_error_and_does_not_block(evaluator, module):
    started = time.monotonic()
    hanging = evaluator("python", entry=f"{module}:hangs")
    results = await asyncio.gather(*(score_item(hanging, item("4"), 0.1) for _ in range(8)))
    assert {result.error for result in results} == {"the evaluator gave no score within 0.1 s"}
    assert time.monotonic() - started < 2
    assert (
        sum(thread.name.startswith("insitu-evaluator") and thread.daemon for thread in threading.enumerate())
        >= 8
    )


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"entry": "yields"}, "is a generator"),
        ({"entry": "plain", "args": {"bonsu": 1}}, r"args \['bonsu'\]: got an unexpected"),
        ({"entry": "plian"}, "did you mean `plain`"),
    ],
)
def test_python_refuses_what_cannot_work(evaluator, module, fields, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        evaluator("python", **fields | {"entry": f"{module}:{fields['entry']}"})


@pytest.fixture
def registry(monkeypatch):
    plugins.load_entry_points()  # first: what is loaded later would be forgotten with the copy
    monkeypatch.setattr(plugins, "_components", dict(plugins._components))


class BonusConfig(ComponentConfig):
    bonus: float = 0.0


async def test_the_decorator_registers_functions(evaluator, registry):
    @register_evaluator("my_plain")
    def my_plain(item):
        return item.output == item.expected

    @register_evaluator("my_bonus", config=BonusConfig)
    async def my_bonus(item, config):
        return EvalResult(item.id, config.bonus, "always")

    assert my_plain(item("4")) is True
    assert await score(evaluator("my_plain"), "4") == 1.0
    assert await score(evaluator("my_bonus", bonus=0.25), "4") == 0.25
    with pytest.raises(ValidationError, match="Extra inputs"):
        evaluator("my_plain", bonus=1)


def test_the_decorator_refuses_what_cannot_work(registry):
    with pytest.raises(InvalidRequest, match="has a config class, but its function takes no config"):
        register_evaluator("x", config=BonusConfig)(lambda item: 1)
    with pytest.raises(InvalidRequest, match=r"let it take \(item\) or \(item, config\)"):
        register_evaluator("x")(lambda: 1)
    with pytest.raises(InvalidRequest, match="is a generator"):

        @register_evaluator("x")
        def yields(item):
            yield 1


class Fixed(Evaluator):
    def __init__(self, value):
        self.value = value

    async def evaluate_item(self, item):
        return EvalResult(item.id, self.value, "fixed")


class Ranks(GroupEvaluator):
    async def evaluate_group(self, items):
        return [EvalResult(item.id, float(at)) for at, item in enumerate(items)]


async def build_weighted(component, parts, **weights):
    known, config = component(Kind.EVALUATOR, "weighted", evaluators=weights)
    async with plugins.build(known, config, parts) as instance:
        return instance


async def test_weighted_mean(component, parts):
    parts.evaluators = {"good": Fixed(1.0), "bad": Fixed(0.0)}
    both = await build_weighted(component, parts, good=3, bad=1)
    assert isinstance(both, Evaluator)
    result = await score_item(both, item("4"), 1)
    assert result.score == 0.75
    assert result.reasoning["good"] == {"score": 1.0, "weight": 3.0, "reasoning": "fixed"}


@dataclass
class Steps(Evaluator):
    rewards: dict[str, float]

    async def evaluate_item(self, item):
        return EvalResult(item.id, 1.0, call_rewards=self.rewards)


async def test_call_rewards_are_weighted_like_scores(component, parts):
    parts.evaluators = {"one": Steps({"c1": 1.0, "c2": -2.0}), "two": Steps({"c2": 6.0}), "plain": Fixed(0.0)}
    whole = await build_weighted(component, parts, one=2, two=1, plain=1)
    called = EvalItem("a", "", "", "", calls=[{"id": "c1"}, {"id": "c2"}])
    result = await score_item(whole, called, 1)
    assert (result.score, result.call_rewards) == (0.75, {"c1": 0.5, "c2": 0.5})


async def test_weighted_with_a_group_member_is_a_group_evaluator(component, parts):
    parts.evaluators = {"good": Fixed(1.0), "ranks": Ranks()}
    both = await build_weighted(component, parts, good=0.5, ranks=0.5)
    assert isinstance(both, GroupEvaluator)
    results = await score_group(both, [item("4"), item("5"), item("6")], 1)
    assert [result.score for result in results] == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("group", [False, True])
async def test_an_error_of_any_member_is_the_error(component, parts, group):
    parts.evaluators = {"good": Ranks() if group else Fixed(1.0), "broken": Fixed(float("nan"))}
    both = await build_weighted(component, parts, good=1, broken=0)
    results = await score_group(both, [item("4"), item("5")], 1)
    assert [result.score for result in results] == [None] * 2
    assert all(str(result.error).startswith("broken: ValueError: the score is nan") for result in results)


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({}, "is empty"),
        ({"a": 1, "b": -1}, "more than 0"),
        ({"a": float("nan")}, "finite"),
        ({"a": float("inf")}, "finite"),
    ],
)
async def test_weights_that_have_no_mean_are_refused(component, parts, weights, complaint):
    with pytest.raises(ValidationError, match=complaint):
        await build_weighted(component, parts, **weights)
