"""`init_from` and `fork_from` in the YAML: what is uploaded, registered and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu.client import InsituClient
from insitu.errors import InsituError, InvalidRequest
from insitu.harness.dry_run import dry_run
from insitu.harness.evaluate import evaluate
from insitu.harness.files.rollout_store import RolloutStore
from tests.support.finetune_bench import FinetuneBench, open_bench
from tests.support.peft_directory import write_peft


def configured(bench: FinetuneBench, name: str, num_epochs: int = 1, **start: Any) -> None:
    """The next run, with its own name and output directory."""
    adapter = {"backend": {"name": name, **start}}
    finetuning = {"output_dir": f"output-{name}", "num_epochs": num_epochs}
    llms = {"policy": {"model_name": name}}
    bench.project.configure(trainer_adapters={"backend": adapter}, finetuning=finetuning, llms=llms)


async def failure(bench: FinetuneBench) -> str:
    """Run to the end, which is a failure; return why."""
    summary = await bench.run()
    assert summary.outcome == "failed"
    return summary.reason


async def checks(bench: FinetuneBench) -> tuple[bool, str]:
    said: list[str] = []
    passed = await dry_run(bench.loaded(), said.append)
    return passed, "\n".join(said)


async def test_a_second_run_starts_from_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        configured(bench, "first")
        assert (await bench.run()).outcome == "succeeded"
        # The trained run under another directory is refused, with the way to go on from it.
        bench.project.configure(
            trainer_adapters={"backend": {"backend": {"name": "first"}}},
            finetuning={"output_dir": "elsewhere"},
            llms={"policy": {"model_name": "first"}},
        )
        assert "`backend.init_from: first@1`" in await failure(bench)

        configured(bench, "second", init_from="first@1")
        passed, said = await checks(bench)
        assert passed, said
        assert "run 'second' of 'tiny', which starts from first@1" in said
        assert (await bench.run(validation_dataset="validation.json")).outcome == "succeeded"
        run = bench.backend.ledger.get_run("second")
        assert (run.init_from, run.source, run.step) == ("first@1", "first@1", 1)
        assert [c.step for c in bench.backend.ledger.checkpoints("second")] == [0, 1]
        with RolloutStore(Path("output-second/trajectories/validation-0000.jsonl")) as store:
            (call, *_) = store.rollouts()[0].read_calls()
        assert (call["policy_step"], call["policy_version"]) == (0, "second@0"), "measured before training"

        # Compared models: step 0 is the start, so `base` would be something else.
        settings = bench.loaded(validation_dataset="validation.json")
        found = await evaluate(settings, ["second@0", "second@1"], bench.progress)
        assert found.before.num_rollouts == 4
        with pytest.raises(InvalidRequest, match="step 0 of run second is first@1, not the base model"):
            await evaluate(settings, ["base", "second@1"], bench.progress)

        configured(bench, "third", fork_from="first")
        assert (await bench.run()).outcome == "succeeded"
        assert bench.backend.ledger.get_run("third").fork_from == "first"


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({"init_from": "first@7"}, "first@7 is not kept on the backend; of run first it has [1]"),
        ({"fork_from": "nobody"}, "the backend has no run 'nobody' to start from"),
        ({"init_from": "./nothing"}, "nothing has no adapter_config.json"),
    ],
)
async def test_a_start_that_is_not_there_is_found_before_anything_runs(
    start: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        configured(bench, "first")
        await bench.run()
        configured(bench, "second", **start)
        passed, lines = await checks(bench)
        assert not passed
        assert f"FAILED  backend: {said}" in lines
        assert said in await failure(bench)
        assert [run.name for run in bench.backend.ledger.list_runs()] == ["first"]


async def test_a_directory_beside_the_agent_is_uploaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[str] = []
    put = InsituClient.put_adapter

    async def counted(self: InsituClient, adapter: Any) -> Any:
        uploads.append(adapter.sha256)
        return await put(self, adapter)

    monkeypatch.setattr(InsituClient, "put_adapter", counted)
    async with open_bench(tmp_path, monkeypatch) as bench:
        write_peft(bench.project.path / "adapter")
        configured(bench, "mine", init_from="./adapter")
        passed, said = await checks(bench)
        assert passed, said
        assert uploads == [], "a check uploads nothing"
        assert (await bench.run()).outcome == "succeeded"
        run = bench.backend.ledger.get_run("mine")
        assert run.source == f"sha256:{uploads[0]}"
        assert (run.lora.rank, run.lora.alpha, run.lora.target_modules) == (2, 8, ["q_proj"])
        configured(bench, "mine", 2, init_from="./adapter")
        assert (await bench.run()).outcome == "succeeded"
        assert len(uploads) == 1, "a run that goes on needs no upload"
        # Other weights under the same name would be another run.
        write_peft(bench.project.path / "adapter", lora_alpha=4)
        configured(bench, "mine", 3, init_from="./adapter")
        assert "init_from is 'sha256" in await failure(bench)
        write_peft(bench.project.path / "adapter", use_dora=True)
        configured(bench, "other", init_from="./adapter")
        assert "use_dora" in await failure(bench)


async def test_a_start_is_checked_with_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        both = {"init_from": "a", "fork_from": "b"}
        for start in ({"init_from": "A run"}, both, {"fork_from": "./adapter"}):
            configured(bench, "small", **start)
            with pytest.raises(InsituError, match=next(reversed(start))):
                bench.loaded()


def test_what_names_a_directory() -> None:
    from insitu.harness.interfaces.settings import BackendSettings

    def directory(text: str) -> Path | None:
        return BackendSettings(ip="localhost", port=1, init_from=text).init_directory

    assert directory("./adapter") == Path("adapter")
    assert directory("/models/adapter") == Path("/models/adapter")
    assert directory("~/adapter") == Path.home() / "adapter"
    assert directory("adapter") is None
    assert directory("run@3") is None
