"""A base sharded over eight ranks on torch's fake process group: what one of them holds at most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from insitu.training.batching import score_batch
from insitu.training.footprint.live_bytes import LiveBytes
from insitu.training.model.loading import empty_model, prepare
from insitu.types import LoraSettings
from tests.gates.gate import gate
from tests.gates.models import MODELS
from tests.support.fake_policy import load_fake_shards

GB = 1e9
RANKS = 8
TOKENS = 16
"""So few that activations are negligible beside the weights: only the head's logits are allowed for."""


@pytest.fixture(params=[0, RANKS - 1])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=request.param, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "mesh"), [("qwen2.5-32b", 0), ("qwen2.5-1.5b", RANKS - 1)], indirect=["mesh"]
)
def test_rank_holds_its_shard_two_layers_embedding_and_head(
    name: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """Through load, scoring, forward and backward; 32B has a head of its own, 1.5B a tied one."""
    policy = prepare(empty_model(MODELS[name], torch.bfloat16), checkpoint_layers=True)
    num_bytes = {key: 2 * p.numel() for key, p in policy.model.named_parameters()}
    layer = sum(size for key, size in num_bytes.items() if ".layers.0." in key)
    embedding = 2 * policy.model.get_input_embeddings().weight.numel()
    batch = score_batch([[1] * TOKENS])
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        adapter = load_fake_shards(policy, mesh, tmp_path, MODELS[name], LoraSettings(rank=16, alpha=32))
        adapters = sum(4 * p.numel() for p in adapter.parameters().values())
        own = sum(num_bytes.values()) / RANKS + adapters
        logits = TOKENS * MODELS[name].vocab_size * 10
        gathered = 2 * layer + 2 * embedding + logits
        gate(f"sharded-load-{name}", live.peak / GB, (own + embedding / RANKS) / GB, "GB")
        live.restart()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                policy(batch)
            gate(f"sharded-score-{name}", live.peak / GB, (own + gathered) / GB, "GB")
            live.restart()
            logprob_t, _ = policy(batch)
        logprob_t.sum().backward()
        own += adapters  # their gradients
        gate(f"sharded-step-{name}", live.peak / GB, (own + gathered) / GB, "GB")
        del logprob_t
        gate(f"sharded-after-{name}", live.now / GB, 1.01 * own / GB, "GB")
