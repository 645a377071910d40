"""Write docs/models.md, the table of the families of models, from families.json.

python tools/models_page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from insitu.training.model.families import Family, families

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
OPENING = """# Which models

Find the `model_type` in the model's `config.json`, and its row below. `insitu serve` reads the same table:
what it does not allow is rejected before an engine starts, with the reason.

**Where this comes from.** `make families` takes a tiny model of each family, with random weights, through the
trainer: loading, log-probabilities within 1e-5 of the plain model's own, gradients within 3e-5 of the
largest, checkpointed layers, and rows with branches. An adapter of it goes through vLLM's own model class and
LoRA manager, where every tensor must have a layer that computes with it. The tiny configurations are each
family's defaults in Transformers with small sizes, not the files of the hub; images, kernels and GPUs are not
part of it. An engine that runs checks the adapter again, tensor by tensor, at every publication.

Whole backends with vLLM's build for CPUs trained two steps each of tiny models, engine and trainer within
1e-4 of each other: `qwen3` and `gemma2` with adapters, `gpt_oss` merged. That build has no kernel for experts
beside adapters, its `lfm2` disagrees with Transformers (by 0.16 on average, with random weights), so that the
first step fails there, and models with images need torchvision beside it.

- **Adapters on**: the linear layers that the trainer adapts and the engine serves. Choose among them with
  `lora.target_modules`.
- **Merged**: whether `--publication merged` can write weights that the engine reads.
- **Ranks**: whether several trainer ranks can share the base model.
- **Shares**: whether a step computes a prompt once that several rollouts begin with. Elsewhere it computes
  every sequence from its start.

`insitu serve` plans a GPU's memory for all of them ([how](gpus.md#any-decoder)).

Models with images are trained on text. Files that are quantised are rejected: give a copy in 16 bits.
"""
EXAMPLES = {
    "apertus": "Apertus",
    "arcee": "AFM 4.5B",
    "bamba": "Bamba",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3, R1",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B",
    "exaone4": "EXAONE 4",
    "falcon_h1": "Falcon-H1",
    "flex_olmo": "FlexOlmo",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 4B to 27B",
    "gemma3_text": "Gemma 3 270M, 1B",
    "gemma4": "Gemma 4",
    "gemma4_text": "the text part of Gemma 4 alone",
    "glm": "GLM-4 9B",
    "glm4": "GLM-4 0414",
    "glm4_moe": "GLM-4.5, 4.6",
    "gpt_oss": "gpt-oss",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE",
    "granitemoehybrid": "Granite 4",
    "helium": "Helium",
    "hunyuan_v1_dense": "Hunyuan dense",
    "hunyuan_v1_moe": "Hunyuan A13B",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 8B-A1B",
    "llama": "Llama 2 and 3, SmolLM2",
    "llama4_text": "the text part of Llama 4",
    "minimax_m2": "MiniMax M2",
    "ministral": "Ministral 8B",
    "ministral3": "the text part of Ministral 3",
    "mistral": "Mistral 7B, Nemo, Small 24B",
    "mistral3": "Mistral Small 3.1, Ministral 3",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron, Minitron",
    "nemotron_h": "Nemotron-H, Nemotron 3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "phi": "Phi-2",
    "phi3": "Phi-3, Phi-4",
    "phimoe": "Phi-3.5 MoE",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_moe": "Qwen1.5 and Qwen2 MoE",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3.5, Qwen3.6",
    "qwen3_5_moe": "Qwen3.5 and Qwen3.6 MoE",
    "qwen3_5_moe_text": "its text part alone",
    "qwen3_5_text": "its text part alone",
    "qwen3_moe": "Qwen3 30B-A3B, 235B-A22B",
    "qwen3_next": "Qwen3-Next",
    "qwen3_vl": "Qwen3-VL",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder2",
}
_HEAD = "| `model_type` | models | adapters on | merged | ranks | shares |\n|---|---|---|---|---|---|\n"


def page() -> str:
    """Return the whole page."""
    known = families().values()
    served = [family for family in known if family.rejected is None]
    rejected = [family for family in known if family.rejected is not None]
    return "\n".join(
        (
            f"{OPENING}\n## Trained and served\n",
            _HEAD + "\n".join(_row(family) for family in served),
            "\n## Rejected\n",
            "| `model_type` | models | reason |\n|---|---|---|\n"
            + "\n".join(f"| `{f.name}` | {EXAMPLES[f.name]} | {_cell(f.rejected or '')} |" for f in rejected),
            "",
        )
    )


def _row(family: Family) -> str:
    answers = (family.merged, family.several_ranks, family.shares_prompts)
    return (
        " | ".join(
            (
                f"| `{family.name}`",
                EXAMPLES[family.name],
                "; ".join(_adapters(family)),
                *("yes" if answer else "no" for answer in answers),
            )
        )
        + " |"
    )


def _adapters(family: Family) -> Iterator[str]:
    yield " ".join(f"`{name}`" for name in family.adapts)
    if family.experts:
        yield "not on experts"
    if family.left_out:
        yield "not on " + ", ".join(f"`{name}`" for name in family.left_out)
    if family.untried:
        yield "not tried " + _cell(family.untried)


def _cell(text: str) -> str:
    return text.replace("|", "/").rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page())
