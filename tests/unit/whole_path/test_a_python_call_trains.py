"""`insitu.finetune(…)`: functions and rows in place of their names give the run that the YAML gives."""

from __future__ import annotations

import asyncio
import json
import linecache
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.errors import Conflict, InvalidRequest
from tests.support.finetune_bench import FinetuneBench, by_generation, one_call, open_bench

pytestmark = pytest.mark.timeout(120)

DOCS = Path(__file__).parents[3] / "docs" / "finetune.md"
TRAINING = [{"id": f"row-{i}", "question": f"question {i}", "answer": str(i)} for i in range(3)]
HELD_OUT = [{"id": f"row-{i}", "question": f"question {i}", "answer": str(i)} for i in range(1000, 1004)]


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FinetuneBench]:
    async with open_bench(tmp_path, monkeypatch) as bench:
        (bench.project.path / "config.yml").unlink()
        yield bench


def short(bench: FinetuneBench, **more: Any) -> dict[str, Any]:
    """The settings of every run here, as in the short form."""
    settings: dict[str, Any] = {
        "model": {"model_name": "tiny", "base_url": f"{bench.backend.gateway_url}/v1", "seed": 3},
        "data": "train.json",
        "validation": "validation.json",
        "backend": {"ip": "127.0.0.1", "port": bench.backend.port, "name": "small"},
        "num_generations": 4,
        "finetuning": {"num_epochs": 2, "output_dir": "output"},
    }
    return {**settings, **more}


def figures(directory: Path) -> list[Any]:
    """Whatever a run has learned from: rewards of each step, accounts, validations."""
    steps = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    history = json.loads((directory / "validation_history.json").read_text())
    kept = ("epoch", "step", "avg_reward", "min_reward", "max_reward", "num_trajectories")
    return [
        [{name: line[name] for name in kept} for line in steps],
        [(entry["step"], entry["avg_reward"], entry.get("remeasured")) for entry in history],
    ]


async def test_functions_and_rows_give_the_run_of_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for name in ("yaml", "call"):
        async with open_bench(tmp_path / name, monkeypatch) as bench:
            if name == "yaml":
                named = {"agent": f"{__name__}:one_call", "reward": f"{__name__}:by_generation"}
                (bench.project.path / "config.yml").write_text(json.dumps(short(bench, **named)))
                assert (await bench.run()).outcome == "succeeded"
            else:
                given = short(bench, agent=lambda value, context: one_call(value, context))
                given |= {"data": TRAINING, "validation": HELD_OUT, "reward": partial(by_generation)}
                result = await insitu.finetune_async(quiet=True, **given)
                assert (result.run, result.updates, result.reason) == ("small", 2, "")
                assert result.output_dir == bench.project.output
                assert result.reward_before == pytest.approx(0.025)
                assert (result.reward_after, result.gain) == (result.reward_before, None)
                assert result.best_step == 0
            found[name] = figures(bench.project.output)
    assert found["call"] == found["yaml"]
    assert [line["step"] for line in found["call"][0]] == [1, 2]


async def test_an_importable_function_is_its_name(bench: FinetuneBench) -> None:
    """A run that a call has begun is resumed by the YAML, and with the same hashes of files."""
    given = short(bench, reward=by_generation, agent=one_call)
    await insitu.finetune_async(quiet=True, **given)
    dumped = bench.project.json("config.json")
    assert "tests.support.finetune_bench:one_call" in json.dumps(dumped)
    names = {
        name: f"{function.__module__}:{name}"
        for name, function in (("one_call", one_call), ("by_generation", by_generation))
    }
    written = {**given, "agent": names["one_call"], "reward": names["by_generation"]}
    (bench.project.path / "config.yml").write_text(json.dumps(written))
    summary = await bench.run()
    assert (summary.outcome, summary.updates) == ("succeeded", 2)
    assert "Continuing" in " ".join(bench.progress.said)


async def test_a_file_is_overridden_key_by_key(bench: FinetuneBench) -> None:
    written = short(bench, agent="no_such_module:run", reward="exact_match")
    (bench.project.path / "config.yml").write_text(json.dumps(written))
    result = await insitu.finetune_async(
        config="config.yml",
        agent=lambda value, context: one_call(value, context),
        reward=by_generation,
        finetuning={"num_epochs": 1},
        quiet=True,
    )
    assert (result.updates, result.run) == (1, "small")
    assert bench.project.output.is_dir(), "output_dir is still the file's"


async def test_an_edited_function_is_noticed(bench: FinetuneBench) -> None:
    def call(text: str, **more: Any) -> Any:
        names: dict[str, Any] = {"__name__": "__main__", "by_generation": by_generation}
        run_file(bench.project.path / "own.py", text, names)
        return insitu.finetune_async(
            **short(bench, agent=one_call, reward=names["score"], quiet=True), **more
        )

    await call("def score(item):\n    return by_generation(item)\n")
    await call("NUM_EPOCHS = 3\n\ndef score(item):\n    return by_generation(item)\n")
    edited = "def score(item):\n    return 2 * by_generation(item)\n"
    with pytest.raises(Conflict, match="reward, __main__:score: other content, 2 lines as before") as caught:
        await call(edited)
    assert "insitu.finetune(…, accept_changes=True)" in caught.value.hint
    await call(edited, accept_changes=True)


async def test_a_function_without_source_is_named(bench: FinetuneBench, capfd: Any) -> None:
    names: dict[str, Any] = {"by_generation": by_generation}
    exec("score = lambda item: by_generation(item)", names)
    await insitu.finetune_async(**short(bench, agent=one_call, reward=names["score"]))
    out = capfd.readouterr().out
    assert "a later change of it goes unnoticed" in out
    assert "Finished. Run" in out


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def run_file(path: Path, text: str, names: dict[str, Any]) -> None:
    """Run a program as the interpreter does, with its source on disk."""
    path.write_text(text)
    linecache.checkcache(str(path))
    exec(compile(text, str(path), "exec"), names)


def call_with(**given: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        insitu.finetune(**given)
    return str(caught.value)


GOOD: dict[str, Any] = {"model": "tiny", "agent": one_call, "data": TRAINING, "reward": by_generation}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"trainning": {}}, "trainning: unknown key; did you mean `training`?"),
        ({"finetuning": {"num_epoch": 3}}, "finetuning.num_epoch: unknown key; did you mean `num_epochs`?"),
        ({"num_generations": "many"}, "num_generations: should be a valid integer"),
        ({"agent": 5}, "agent: should be module:function or the URL of a service, or a mapping, not 5"),
        ({"model": one_call}, "model: should be a value, not a function"),
        (
            {"finetuning": {"num_epochs": one_call}},
            "finetuning.num_epochs: should be a value, not a function",
        ),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate: should be a finite number"),
        ({"model": None}, "model: is missing; it names the model to train"),
        ({"config": "nowhere.yml"}, "nowhere.yml: the file does not exist"),
    ],
)
def test_wrong_arguments_are_rejected_as_in_a_file(wrong: dict[str, Any], said: str) -> None:
    assert said in call_with(**{**GOOD, **wrong})


async def test_a_running_loop_is_told_what_to_await() -> None:
    assert "await insitu.finetune_async(…) with the same arguments" in call_with(**GOOD)


def test_wrong_rows_and_functions_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "the given rows: row 0 is a int, not a dict" in call_with(**{**GOOD, "data": [1, 2]})
    assert "<lambda>` is a generator" in call_with(**{**GOOD, "reward": lambda item: (yield)})


def documented() -> list[str]:
    """The programs of the page's section."""
    section = DOCS.read_text().partition("## From Python")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


async def test_the_documented_program_runs(bench: FinetuneBench, capfd: Any) -> None:
    """In a thread, which has no event loop."""
    place, (program, _) = short(bench), documented()
    address = f"model={place['model']}, backend={place['backend']}"
    program = replaced(program, 'model="Qwen/Qwen2.5-3B-Instruct"', address)
    program = replaced(program, "range(16)", "range(2)")
    # All answers of the stand-in are equally long, which would teach nothing.
    program = replaced(program, "len(item.output)", "sum(item.rollout_id.encode())")
    program = replaced(program, '{"num_epochs": 20}', '{"num_epochs": 1}')
    (bench.project.path / "data").mkdir()
    (bench.project.path / "data" / "validation.json").write_text(json.dumps(HELD_OUT))
    names: dict[str, Any] = {"__name__": "__main__"}
    await asyncio.to_thread(run_file, bench.project.path / "train.py", program, names)
    assert names["result"].updates == 1
    assert names["result"].output_dir == bench.project.path / "output" / "small"
    assert re.search(r"^small \d ", capfd.readouterr().out, re.MULTILINE)


async def test_the_documented_cell_runs(bench: FinetuneBench) -> None:
    _, cell = documented()
    written = short(bench, agent=f"{__name__}:one_call", reward=f"{__name__}:by_generation")
    (bench.project.path / "config.yml").write_text(json.dumps(written))
    cell = replaced(cell, '{"num_epochs": 50}', '{"num_epochs": 1}')
    names: dict[str, Any] = {"insitu": insitu}
    exec(f"async def run_cell():\n    {cell}    return result", names)
    assert (await names["run_cell"]()).updates == 1


async def test_a_failed_run_raises_its_cause_and_can_be_resumed(bench: FinetuneBench) -> None:
    def broken(value: Any) -> str:
        raise RuntimeError(f"no answer to {value}")

    given = short(bench, reward=by_generation, quiet=True)
    with pytest.raises(insitu.InsituError, match="no answer to question") as caught:
        await insitu.finetune_async(agent=broken, **given)
    assert "insitu.finetune(…) with the same arguments continues" in caught.value.__notes__[0]


async def test_cancelling_it_stops_the_run(bench: FinetuneBench) -> None:
    started = asyncio.Event()

    async def slow(value: Any, context: Any) -> str:
        started.set()
        await asyncio.sleep(60)
        return ""

    running = asyncio.create_task(
        insitu.finetune_async(**short(bench, agent=slow, reward=by_generation, quiet=True))
    )
    first = asyncio.ensure_future(started.wait())
    await asyncio.wait([running, first], return_when=asyncio.FIRST_COMPLETED)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_importing_insitu_stays_light() -> None:
    code = "import insitu, sys; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "pydantic", "aiohttp", "yaml", "rich", "matplotlib", "numpy"):
        assert f"'{heavy}'" not in loaded
