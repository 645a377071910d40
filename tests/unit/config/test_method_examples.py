"""The example of every method loads, and its builder and method fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.config.load import load_config
from insitu.harness.assembly import Assembly
from insitu.harness.finetune import build_components
from insitu.harness.interfaces.settings import AdapterConfig

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "addition"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "methods.md"
METHODS = {
    "config": "grpo",
    "sft": "sft",
    "expert_iteration": "sft",
    "recorded": "sft",
    "dpo_pairs": "dpo",
    "dpo": "dpo",
    "distill": "distill",
    "distill_server": "distill",
}


def write_recorded_run(folder: Path) -> None:
    """The least that a run leaves behind: its configuration and one rollout."""
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.json").write_text('{"config": {}}')
    line = '{"rollout_id": "r", "example_id": "3+7", "index": 0, "generation": 0, "ending": "completed"}\n'
    (folder / "trajectories" / "epoch-0000.jsonl").write_text(line)


@pytest.mark.parametrize("name", METHODS)
async def test_the_example_fits_together(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(EXAMPLES / "data")
    write_recorded_run(tmp_path / "output")
    loaded = load_config(EXAMPLES / f"{name}.yml")
    async with Assembly(loaded) as parts:
        made = await build_components(parts)
        assert made.adapter.method == METHODS[name]
        task = await made.training_task(parts)
    assert len(task.examples) == (1 if name == "recorded" else 16)
    adapter = loaded.config.trainer_adapters["backend"]
    assert isinstance(adapter, AdapterConfig)
    assert f"examples/addition/{name}.yml" in PAGE.read_text()


def test_every_example_is_checked() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yml")} == set(METHODS)
    names = [load_config(EXAMPLES / f"{name}.yml") for name in METHODS]
    runs = [each.config.trainer_adapters["backend"].backend.name for each in names]  # pyright: ignore
    outputs = [each.config.finetuning.output_dir for each in names]
    assert len(set(runs)) == len(set(outputs)) == len(METHODS), "they may run side by side"
