"""`insitu eval`: two models on the validation examples, with nothing trained and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from insitu.errors import Conflict, InvalidRequest, NotFound
from insitu.harness.compared_model import OutsideModel, ServedStep, read_model
from insitu.harness.evaluate import evaluate
from insitu.harness.gains.gain import GainOutcome
from insitu.harness.screen.comparison_table import comparison_lines
from insitu.system.processes import free_port
from tests.support.finetune_bench import FinetuneBench, agent, ask, open_bench, rewards
from tests.support.peft_directory import write_peft

SETTINGS = {"validation_dataset": "validation.json", "validation_samples": 2}


async def one_call(value: Any, context: Any) -> str:
    answer = await ask(context.llm(), [{"role": "user", "content": str(value)}])
    return answer["message"]["content"]


async def fails_after_training(value: Any, context: Any) -> str:
    if "small@1" in context.llm().model:
        raise RuntimeError("told to fail")
    return await one_call(value, context)


def better_each_step(item: Any) -> float:
    """Held-out examples score by the step that answered; a model without a record scores 0.25."""
    generation = int(item.rollout_id.split(".")[-2])
    if ".eval" not in item.rollout_id:
        return generation / 10
    return 0.1 * generation + (0.3 * item.calls[-1]["policy_step"] if item.calls else 0.25)


def state_of(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


async def train(bench: FinetuneBench, workflow: Any = one_call, num_epochs: int = 2) -> None:
    bench.project.write_rows("validation.json", 8, start=1000)
    bench.project.configure(
        workflow=agent(workflow), eval=rewards(better_each_step), finetuning={"num_epochs": num_epochs}
    )
    assert (await bench.run()).outcome == "succeeded"


async def test_two_steps_are_compared_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    async with open_bench(tmp_path, monkeypatch) as bench:
        await train(bench)
        before = state_of(bench.project.path)
        found = await evaluate(bench.loaded(**SETTINGS), ["base", "small@2"], bench.progress)
        # By hand: step 0 has 0 and 0.1 for every example, step 2 has 0.6 and 0.7.
        assert (found.before.measurement.mean, found.after.measurement.mean) == pytest.approx((0.05, 0.65))
        assert found.gain is not None
        assert found.gain.outcome is GainOutcome.BETTER
        assert found.gain.difference == pytest.approx(0.6)
        assert (found.num_examples, found.num_samples, found.after.num_rollouts) == (8, 2, 16)
        assert found.sentence.startswith(
            "The difference of these two checkpoints is real: small@2 is better than base (+0.600, 95 % "
        )
        table = comparison_lines(found)
        assert table[1].split() == ["base", "0.050", "±", "0.000", "16", "0"]
        assert table[2].split() == ["small@2", "0.650", "±", "0.000", "16", "0"]
        assert state_of(bench.project.path) == before
        assert not list((tmp_path / "temporary").iterdir())
        assert bench.backend.ledger.get_run("small").step == 2, "nothing was trained"
        assert not bench.backend.ledger.open_leases(), "the leases were released"


@asynccontextmanager
async def standin_server(asked: list[tuple[str, str, str]]) -> AsyncIterator[str]:
    """A server of the OpenAI protocol that notes path, key and model of every call."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append((request.path, request.headers["Authorization"], body["model"]))
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "hello"}}]})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port := free_port())
        await site.start()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()


async def test_any_model_behind_the_openai_protocol_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_KEY", "its-own-key")
    asked: list[tuple[str, str, str]] = []
    async with open_bench(tmp_path, monkeypatch) as bench, standin_server(asked) as url:
        await train(bench, num_epochs=1)
        settings, kept = bench.loaded(**SETTINGS), tmp_path / "kept"
        models = [f"{url}#org/other#OTHER_KEY", "small@1"]
        found = await evaluate(settings, models, bench.progress, kept)
        assert set(asked) == {("/v1/chat/completions", "Bearer its-own-key", "org/other")}
        assert len(asked) == 16
        assert found.before.measurement.mean == pytest.approx(0.3)
        assert found.after.measurement.mean == pytest.approx(0.35)
        names = sorted(file.name for file in kept.iterdir() if file.suffix != ".tokens")
        port = url.split(":")[2].removesuffix("/v1")
        outside = f"1-http-127-0-0-1-{port}-v1-org-other.jsonl"
        assert names == [outside, "2-small-1.jsonl", "comparison.json"]
        assert json.loads((kept / "comparison.json").read_text()) == found.to_dict()
        with pytest.raises(Conflict, match="is not empty"):
            await evaluate(settings, models, bench.progress, kept)


async def test_a_model_without_any_reward_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        await train(bench, fails_after_training, num_epochs=1)
        with pytest.raises(InvalidRequest, match=r"small@1 could not be measured: all 16 rollouts failed"):
            await evaluate(bench.loaded(**SETTINGS), ["base", "small@1"], bench.progress)
        with pytest.raises(NotFound, match="7"):
            await evaluate(bench.loaded(**SETTINGS), ["base", "small@7"], bench.progress)
        with pytest.raises(InvalidRequest, match="there is no validation dataset"):
            await evaluate(bench.loaded(), ["base", "small@1"], bench.progress)


async def test_the_command_prints_json_on_standard_output_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.write_rows("validation.json", 8, start=1000)
        bench.project.configure(finetuning={"num_epochs": 1})
        assert (await bench.run()).outcome == "succeeded"
        command = [sys.executable, "-m", "insitu.cli", "eval", "base", "small@1", "--config_file=config.yml"]
        options = ["--validation_dataset=validation.json", "--samples=3", "--temperature=0.5", "--json"]
        process = await asyncio.create_subprocess_exec(
            *command, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        found = json.loads(out)
        assert [model["name"] for model in found["models"]] == ["base", "small@1"]
        assert [model["num_rollouts"] for model in found["models"]] == [24, 24]
        assert found["gain"]["num_examples"] == 8
        assert found["gain"]["low"] <= found["gain"]["difference"] <= found["gain"]["high"]


def test_models_are_read_from_the_command_line() -> None:
    assert read_model("base") == ServedStep("base", 0)
    assert read_model("my-run@12") == ServedStep("my-run@12", 12, "my-run")
    outside = read_model("https://api.example.org/v1/#org/model-7b#MY_KEY")
    label = "https://api.example.org/v1#org/model-7b"
    assert outside == OutsideModel(label, "https://api.example.org/v1", "org/model-7b", "MY_KEY")
    plain = read_model("http://127.0.0.1:9000/v1#mine")
    assert isinstance(plain, OutsideModel)
    assert plain.key() == "none"


@pytest.mark.parametrize(
    "text", ["my-run", "my-run@", "@3", "my-run@x", "ftp://h/v1#m", "http://h/v1", "http://h/v1#"]
)
def test_other_texts_are_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_model(text)


async def test_an_adapter_directory_is_served_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        await train(bench, num_epochs=1)
        mine = str(write_peft(tmp_path / "mine"))
        found = await evaluate(bench.loaded(**SETTINGS), [mine, "small@1"], bench.progress)
        assert (found.before.name, found.before.num_rollouts) == (mine, 16)
        # Answered by step 0 of a run of its own, and recorded.
        assert (found.before.measurement.mean, found.after.measurement.mean) == pytest.approx((0.05, 0.35))
        (run,) = [run for run in bench.backend.ledger.list_runs() if run.name.startswith("adapter-")]
        assert (run.state, run.step, run.lora.rank) == ("closed", 0, 2)
        again = await evaluate(bench.loaded(**SETTINGS), ["small@1", mine], bench.progress)
        assert again.after.measurement.mean == pytest.approx(0.05)
        assert len(bench.backend.ledger.list_runs()) == 2


def test_a_missing_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    model = read_model("http://127.0.0.1:9000/v1#mine#NO_SUCH_KEY")
    assert isinstance(model, OutsideModel)
    with pytest.raises(InvalidRequest, match="NO_SUCH_KEY, which is not set"):
        model.key()
