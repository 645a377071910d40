"""Which layers an adapter sits on: chosen, refused, and published with the layers beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.errors import CannotHonour, Conflict
from insitu.training.model.export import ADAPTED_FILE
from insitu.types import LoraSettings, StepSettings
from tests.support.sequences import train

LAYERS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
SOME = LoraSettings(rank=4, target_modules=["v_proj", "q_proj"])
pytestmark = pytest.mark.timeout(120)


def adapted_layers(path: Path) -> set[str]:
    names = load_file(path / "adapter" / "adapter_model.safetensors")
    return {name.split(".")[-3] for name in names}


def test_only_the_chosen_layers_are_adapted(trainer: TrainerRank, make_sequences, tmp_path: Path) -> None:
    assert trainer.info()["linear_layers"] == LAYERS
    trainer.open_run("some", SOME)
    train(trainer, "some", make_sequences(), StepSettings(learning_rate=1e-2))
    trainer.save("some", str(tmp_path))
    assert adapted_layers(tmp_path) == {"q_proj", "v_proj"}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (4, ["q_proj", "v_proj"])
    assert trainer.open_run("some", SOME, str(tmp_path)) == 1
    with pytest.raises(Conflict, match="target_modules"):
        trainer.open_run("some", LoraSettings(rank=4), str(tmp_path))


@pytest.mark.parametrize("module", ["lm_head", "query", "layers"])
def test_a_layer_that_cannot_be_adapted_is_refused_with_the_choice(trainer: TrainerRank, module: str) -> None:
    with pytest.raises(CannotHonour, match=f"{module} cannot be adapted") as refused:
        trainer.open_run("run", LoraSettings(target_modules=["q_proj", module]))
    assert ", ".join(LAYERS) in str(refused.value.hint)


def test_a_checkpoint_of_an_earlier_release_adapts_all_layers(trainer: TrainerRank, tmp_path: Path) -> None:
    trainer.open_run("run", LoraSettings())
    trainer.save("run", str(tmp_path))
    state = json.loads((tmp_path / "state.json").read_text())
    del state["lora"]["target_modules"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert trainer.open_run("run", LoraSettings(), str(tmp_path)) == 0
    assert adapted_layers(tmp_path) == set(LAYERS)


def test_merged_weights_of_two_runs_with_other_layers_do_not_mix(
    trainer: TrainerRank, model_dir: Path, make_sequences, tmp_path: Path
) -> None:
    """An engine reloads the adapted file alone, and fuses q, k and v: all linear layers are in it."""
    base = load_file(model_dir / "model.safetensors")
    linear = {name for name in base if name.split(".")[-2] in LAYERS}
    for run, lora in (("all", LoraSettings()), ("some", SOME)):
        trainer.open_run(run, lora)
        train(trainer, run, make_sequences(), StepSettings(learning_rate=1e-2))
        trainer.export_merged(run, str(tmp_path / run), "float32")
        with safe_open(tmp_path / run / ADAPTED_FILE, framework="pt") as adapted:
            assert set(adapted.keys()) == linear
            changed = {n for n in linear if not torch.equal(adapted.get_tensor(n), base[n])}
        wanted = linear if run == "all" else {n for n in linear if n.split(".")[-2] in ("q_proj", "v_proj")}
        assert changed == wanted
