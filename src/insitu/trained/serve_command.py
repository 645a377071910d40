"""The command that serves exported weights with a plain vLLM, of any build."""

from __future__ import annotations

from pathlib import Path

from insitu.harness.screen.vllm_flags import SERVER, adapter_flags

# As insitu serves it: the sampling that a call does not name is vLLM's, not the base model's.
_SAMPLING = ("--generation-config", "vllm")


def adapter_command(name: str, directory: Path, base_model: str, rank: int) -> list[str]:
    """Return the words that serve an adapter on its base model, as the model `name`."""
    return [*SERVER, "--model", base_model, *adapter_flags(name, str(directory), rank), *_SAMPLING]


def merged_command(name: str, directory: Path, dtype: str | None = None) -> list[str]:
    """Return the words that serve merged weights as the model `name`; `dtype` if it is not the base's own."""
    precision = [] if dtype is None else ["--dtype", dtype]
    return [*SERVER, "--model", str(directory), "--served-model-name", name, *precision, *_SAMPLING]
