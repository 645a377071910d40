"""The examples of docs/evaluation.md do what the page says."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

from insitu import plugins
from insitu.config.load import load_config
from insitu.plugins import Kind, find
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import score_item

PAGE = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The Python examples, each in the file that its first line names."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    plugins.load_entry_points()  # first: what is loaded later would be forgotten with the copy
    monkeypatch.setattr(plugins, "_components", dict(plugins._components))
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        path = tmp_path / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    importlib.invalidate_caches()
    yield
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("my_rows", "my_rewards", "my_calls", "my_package")
    ]:
        del sys.modules[name]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_configuration_loads(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    loaded = load_config(path)
    written = yaml.safe_load(text)["eval"]
    assert set(loaded.config.eval.evaluators) == set(written.get("evaluators", {}))
    assert bool(loaded.config.eval.general.dataset) == bool(written.get("general", {}).get("dataset"))


def test_the_first_dataset(tmp_path, dataset):
    (tmp_path / "train.jsonl").write_text(blocks("json")[0])
    examples = dataset("jsonl", file_path=tmp_path / "train.jsonl").load()
    assert [(example.id, example.expected) for example in examples] == [("1", 4), ("2", 2.5)]


def test_the_custom_dataset(dataset, modules):
    assert dataset("custom", function="my_rows:sums", kwargs={"count": 3}).load()[2].expected == 4


async def test_the_custom_reward(evaluator, modules):
    reward = evaluator("python", entry="my_rewards:short_and_right", args={"limit": 3})
    result = await score_item(reward, EvalItem("a", "2+2", 4, "it is 4"), 5)
    assert result == EvalResult("a", 0.5, {"right": True, "long": True})


async def test_the_reward_of_single_steps(evaluator, modules):
    reward = evaluator("python", entry="my_calls:right_without_failed_tools", args={"penalty": 0.2})
    asked = [
        {"id": name, "function": {"name": "add", "arguments": text}}
        for name, text in (("t1", "{}"), ("t2", "{"), ("t3", "{}"))
    ]
    answer = {"role": "assistant", "tool_calls": asked}
    results = [
        {"role": "tool", "tool_call_id": name, "content": text}
        for name, text in (("t1", "Error: no numbers"), ("t2", "Error: no JSON"), ("t3", "4"))
    ]
    calls = [
        {"id": "c1", "messages": [], "answer": answer},
        {"id": "c2", "messages": [answer, *results], "answer": {"content": "It is 4"}},
    ]
    result = await score_item(reward, EvalItem("a", "2+2", 4, "It is 4", calls=calls), 5)
    assert result == EvalResult("a", 1.0, call_rewards={"c1": -0.4})


async def test_the_registered_reward(evaluator, modules):
    sys.path.append(str(Path.cwd()))
    importlib.import_module("my_package.rewards")
    one = evaluator("call_budget", max_calls=1)
    assert (await score_item(one, EvalItem("a", "", "", "", calls=[{}, {}]), 5)).score == 0.0


def test_every_type_is_on_the_page():
    for kind, own in ((Kind.DATASET, "insitu."), (Kind.EVALUATOR, "insitu.")):
        for name in plugins.names(kind):
            if find(kind, name).origin.startswith(own):
                assert f"| `{name}` |" in PAGE, name
