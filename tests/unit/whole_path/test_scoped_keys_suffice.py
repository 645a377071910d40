"""`insitu finetune` and `insitu eval` need no more than a key to infer and a key to submit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu.access.key_changes import create_key
from insitu.access.keyring import Keyring
from insitu.access.scopes import Scope
from insitu.harness.evaluate import evaluate
from tests.support.finetune_bench import FinetuneBench, agent, ask, open_bench, rewards
from tests.support.peft_directory import write_peft

VALIDATION = {"validation_dataset": "validation.json"}


async def one_call(value: Any, context: Any) -> str:
    answer = await ask(context.llm(), [{"role": "user", "content": str(value)}])
    return answer["message"]["content"]


def best_at_one(item: Any) -> float:
    if "validation" not in item.rollout_id:
        return int(item.rollout_id.split(".")[-2]) / 10
    return {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.5}[item.calls[-1]["policy_step"]]


def use_keys(bench: FinetuneBench, *, infer: str, submit: str) -> None:
    bench.project.configure(
        llms={"policy": {"api_key": infer}},
        trainer_adapters={"backend": {"backend": {"api_key": submit}}},
        workflow=agent(one_call),
        eval=rewards(best_at_one),
        finetuning={"num_epochs": 3},
    )


async def test_training_and_evaluation_with_two_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INSITU_API_KEY", raising=False)
    seen: set[frozenset[Scope]] = set()
    recognise = Keyring.holder

    def noted(self: Keyring, given: Any) -> Any:
        holder = recognise(self, given)
        if holder is not None:
            seen.add(holder.scopes)
        return holder

    async with open_bench(tmp_path, monkeypatch, keep_checkpoints=2) as bench:
        infer, _ = create_key(bench.backend.state_dir, "agent", [Scope.INFER])
        submit, _ = create_key(bench.backend.state_dir, "trainer", [Scope.SUBMIT])
        use_keys(bench, infer=infer, submit=submit)
        monkeypatch.setattr(Keyring, "holder", noted)
        summary = await bench.run(**VALIDATION, validation_interval=1)
        assert (summary.outcome, summary.best_step) == ("succeeded", 1)
        kept = {each.step: each.pinned for each in bench.backend.ledger.checkpoints("small")}
        assert kept == {1: True, 2: False, 3: False}  # the best step was pinned
        mine = str(write_peft(tmp_path / "mine"))
        await evaluate(bench.loaded(**VALIDATION), [mine, "small@1"], bench.progress)
        (run,) = [run for run in bench.backend.ledger.list_runs() if run.name.startswith("adapter-")]
        assert run.state == "closed"  # its run was closed
        assert seen == {frozenset({Scope.INFER}), frozenset({Scope.SUBMIT})}


async def test_a_key_without_the_scope_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        infer, _ = create_key(bench.backend.state_dir, "agent", [Scope.INFER])
        use_keys(bench, infer=infer, submit=infer)
        summary = await bench.run()
        assert (summary.outcome, summary.epochs_done) == ("failed", 0)
        assert "trainer_adapters.<name>.backend.api_key does not suffice" in summary.reason
        assert "scope `submit`" in summary.reason
        assert "insitu keys create NAME --scope submit" in summary.reason
