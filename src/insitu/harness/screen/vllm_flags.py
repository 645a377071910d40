"""The words by which a plain vLLM serves an adapter."""

from __future__ import annotations

import json

SERVER = ("python", "-m", "vllm.entrypoints.openai.api_server")
"""In every build of vLLM; some have no `vllm` command."""

_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Values that `--max-lora-rank` accepts; the default is 16."""


def adapter_flags(name: str, path: str, rank: int) -> list[str]:
    """Return the words that serve the adapter of this rank in `path` as the model `name`."""
    module = f"{name}={path}"
    if "," in module:  # vLLM parses an argument with a comma as JSON
        module = json.dumps({"name": name, "path": path})
    allowed = next((each for each in _RANKS if each >= rank), rank)
    limit = [] if allowed == _RANKS[0] else ["--max-lora-rank", str(allowed)]
    return ["--enable-lora", *limit, "--lora-modules", module]
