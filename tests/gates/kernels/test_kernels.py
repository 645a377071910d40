"""Kernels for GPUs without one: the trainer's attention compiled for it, vLLM's kernels interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gates.gate import gate
from tests.gates.kernels.compile_flex import SHARED_BYTES

pytestmark = pytest.mark.timeout(400)

IN_CI = ("8.9", 128)
"""The tightest: an RTX 4090 with the head size of most models."""
CASES = [
    pytest.param(capability, head, marks=() if (capability, head) == IN_CI else (pytest.mark.sweep,))
    for capability in SHARED_BYTES
    for head in (64, 128)
]


def printed(module: str, *arguments: str, **environment: str) -> Any:
    """Run a module in a process of its own, because it changes torch and Triton; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.gates.kernels.{module}", *arguments],
        env=os.environ | environment,
        timeout=380,
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("capability", "head"), CASES)
def test_attention_compiles_within_the_shared_memory_of_a_gpu(
    capability: str, head: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = str(tmp_path_factory.mktemp("kernels"))
    kernels = printed(
        "compile_flex", capability, str(head), TRITON_CACHE_DIR=cache, TORCHINDUCTOR_CACHE_DIR=cache
    )
    assert {kernel["kernel"] for kernel in kernels} == {"flex_attention", "flex_attention_backward"}
    for kernel in kernels:
        name = f"shared-{kernel['kernel']}-{capability}-{head}"
        gate(name, kernel["shared"], kernel["limit"], "B")


def test_vllm_s_kernels_compute_as_defined() -> None:
    found = printed("interpreted")
    gate("v2-logprobs", found["logprobs"], 1e-5, "nats")
    gate("v2-ranks", found["wrong_ranks"], 0, "wrong")
    gate("v2-draws", found["draws"], 2 * found["multinomial"], "total variation")
    gate("lora-shrink", found["shrink"], 1e-5, "of the largest")
    gate("lora-expand", found["expand"], 2e-3, "of the largest")
    gate("lora-none", found["touched_without_adapter"], 0, "changed")
