"""One rank of the trainer: the base model once, the runs' adapters on it, one training step at a time.

Every method is called on all ranks at once with the same arguments; with several ranks each is a
collective. All ranks compute the same plan and take their share of it, so they exchange only gradients,
sums and (if the base is sharded) weights::

    sequences ─► plan ─► rank 0: micro-batch, micro-batch, …  ─┐
                    └──► rank 1: micro-batch, filler, …       ─┴► Σ gradients ─► the same step everywhere
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from insitu.errors import InvalidRequest, NotFound
from insitu.training.batching import MicroBatch, Packing, collate, filler, pack, plan, score_batch
from insitu.training.export import MergedExport
from insitu.training.learner import Learner, load_adapter
from insitu.training.lora import AdapterPool, merged_tensors
from insitu.training.loss import Totals
from insitu.training.objective import objective_of, shares_of
from insitu.training.passes import Passes, step_metrics
from insitu.training.policy import load_policy, model_directory, shard
from insitu.training.sequences import check_sequence
from insitu.training.step import Score, Update, optimizer_step
from insitu.types import LoraSettings, StepSettings, TrainingSequence

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FLOAT16_LOSS_SCALE = 1024.0
"""Per-token gradients are far below 1 and would underflow in float16 without it."""
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank that waits longer for another one raises: the other is dead or hangs."""


class TrainerRank:
    """One trainer rank. `dtype` is the compute precision: ``bfloat16`` and ``float16`` apply to matrix
    products (autocast) over float32 weights, ``float32`` to everything."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        base_model: str,
        dtype: str,
        num_threads: int,
        device: str = "cpu",
        max_micro_batch_tokens: int = 2048,
    ) -> None:
        if dtype not in _DTYPES:
            raise InvalidRequest(f"dtype {dtype!r} is unknown", hint=f"one of {', '.join(_DTYPES)}")
        torch.set_num_threads(num_threads)
        self._rank = rank
        self._world_size = world_size
        self._base_model = base_model
        self._base_directory = model_directory(base_model)
        self._dtype = _DTYPES[dtype]
        self._loss_scale = _FLOAT16_LOSS_SCALE if dtype == "float16" else 1.0
        self._device = torch.device(device)
        self._max_micro_batch_tokens = max_micro_batch_tokens
        started = time.perf_counter()
        self._policy = load_policy(base_model, self._device)
        self._max_length: int | None = getattr(self._policy.model.config, "max_position_embeddings", None)
        self._vocabulary_size: int = self._policy.model.get_input_embeddings().weight.shape[0]
        if world_size > 1:
            self._join(master_address, master_port)
            shard(self._policy, init_device_mesh(self._device.type, (world_size,)))
        self._adapters = AdapterPool(self._policy.model)
        self._learners: dict[str, Learner] = {}
        self._frozen_exports: dict[torch.dtype, Path] = {}
        self._load_seconds = time.perf_counter() - started
        log.info("rank %d/%d loaded %s in %.1f s", rank, world_size, base_model, self._load_seconds)

    def _join(self, master_address: str, master_port: int) -> None:
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            init_method=f"tcp://{master_address}:{master_port}",
            rank=self._rank,
            world_size=self._world_size,
            timeout=_COLLECTIVE_TIMEOUT,
        )

    # ── runs ────────────────────────────────────────────────────────────────────────────────────────

    def open_run(self, run: str, lora: LoraSettings, checkpoint_dir: str | None = None) -> dict[str, Any]:
        """Open the run with a fresh adapter and optimizer, or a checkpoint's; replace it if already open."""
        self.close_run(run)
        learner = Learner(run, self._adapters.add(lora))
        if checkpoint_dir is not None:
            try:
                learner.load(Path(checkpoint_dir))
            except BaseException:
                self._adapters.remove(learner.adapter)
                raise
        self._learners[run] = learner
        return {"run": run, "step": learner.step}

    def close_run(self, run: str) -> None:
        """Free the run's adapter and optimizer; do nothing if the run is not open."""
        learner = self._learners.pop(run, None)
        if learner is not None:
            self._adapters.remove(learner.adapter)

    def _learner(self, run: str) -> Learner:
        if run not in self._learners:
            raise NotFound(
                f"run {run} is not open on trainer rank {self._rank}; open are {sorted(self._learners)}",
                hint="open_run first",
            )
        return self._learners[run]

    # ── learning ────────────────────────────────────────────────────────────────────────────────────

    def train_step(
        self,
        run: str,
        sequences: list[TrainingSequence],
        settings: StepSettings,
        reference_dir: str | None = None,
    ) -> dict[str, float]:
        """Train one step over all sequences: `num_passes` updates. Return the metrics that are finite.

        Sequences without a gradient are skipped. If none is left, weights and moments do not change at all;
        a gradient that is not finite ends the step without its update. `reference_dir` is the KL penalty's
        reference checkpoint; without it the base model is the reference.
        """
        started = time.perf_counter()
        learner, objective = self._learner(run), objective_of(settings)
        for sequence in sequences:
            check_sequence(sequence, self._vocabulary_size, self._max_length)
        shares = shares_of(sequences, objective, settings)
        num_tokens = sum(sum(share.sequence.mask) for share in shares)
        totals: list[Totals] = []
        updates: list[Update] = []
        packing = pack(shares, self._max_micro_batch_tokens, self._world_size, self._policy.can_branch)
        self._adapters.activate(learner.adapter)
        with learner.rng(), self._reference(learner, reference_dir) as score_reference:
            num_rollouts = 1 + max((share.rollout for share in shares), default=0)
            passes = Passes(
                self._micro_batches(packing),
                num_rollouts,
                objective,
                settings,
                self._add_up,
                self._loss_scale,
            )
            while shares and len(updates) < settings.num_passes:
                totals.append(passes.run(self._score, score_reference))
                updates.append(self._update(learner, settings))
                if updates[-1].skipped:
                    break
        learner.step += 1
        counts = {
            "num_tokens": num_tokens,
            "num_sequences": len(shares),
            "num_input_tokens": sum(len(share.sequence.token_ids) for share in shares),
            "num_computed_tokens": packing.num_computed_tokens,
            "updated": int(any(not update.skipped for update in updates)),
            "skipped": sum(update.skipped for update in updates),
            "grad_norm": updates[0].grad_norm if updates else 0.0,
        }
        seconds = time.perf_counter() - started
        speed = {"time/train_seconds": seconds, "tokens_per_second": counts["num_input_tokens"] / seconds}
        metrics = step_metrics(totals, num_tokens) | counts | speed
        return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}

    def _micro_batches(self, packing: Packing) -> list[MicroBatch]:
        """Collate this rank's part of the step, the same for every pass."""
        return [collate(part).to(self._device) for part in packing.ranks[self._rank]]

    def _add_up(self, tensor: Tensor) -> None:
        if self._world_size > 1:
            dist.all_reduce(tensor)

    @contextmanager
    def _reference(self, learner: Learner, reference_dir: str | None) -> Iterator[Score]:
        """Yield the scorer of the KL penalty's reference; a checkpoint is loaded for this step only."""
        if reference_dir is None:
            yield self._score_base
            return
        reference = self._adapters.add(learner.adapter.settings)

        def score(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            self._adapters.activate(reference)
            try:
                return self._score(batch)
            finally:
                self._adapters.activate(learner.adapter)

        try:
            load_adapter(reference, Path(reference_dir))
            self._adapters.activate(learner.adapter)
            yield score
        finally:
            self._adapters.remove(reference)
            self._adapters.activate(learner.adapter)

    def _update(self, learner: Learner, settings: StepSettings) -> Update:
        parameters = list(learner.parameters.values())
        if self._world_size > 1:
            _sum_gradients([p.grad for p in parameters if p.grad is not None])
        return optimizer_step(parameters, learner.optimizer, settings, self._loss_scale)

    def _score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            return self._policy(batch)

    def _score_base(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        with self._adapters.off():
            return self._score(batch)

    @torch.no_grad()
    def score(self, run: str, token_ids: list[list[int]], adapter: bool = True) -> list[list[float]]:
        """Return each token's log-probability from the second on, under the run's policy or just the base."""
        self._adapters.activate(self._learner(run).adapter)
        wanted = [i for i, ids in enumerate(token_ids) if len(ids) > 1]
        batches = plan([len(token_ids[i]) for i in wanted], self._max_micro_batch_tokens, self._world_size)
        width = max((len(ids) for ids in token_ids), default=0)
        scores = torch.zeros(len(token_ids), width, device=self._device)
        for places in batches[self._rank]:
            rows = [wanted[place] for place in places]
            batch = score_batch([token_ids[i] for i in rows]) if rows else filler()
            logprob_t, _ = (self._score if adapter else self._score_base)(batch.to(self._device))
            for i, part in zip(
                rows, logprob_t.split([len(token_ids[i]) - 1 for i in rows] or [1]), strict=False
            ):
                scores[i, : len(part)] = part
        self._add_up(scores)  # every entry is zero on all ranks but one
        return [row[: max(0, len(ids) - 1)].tolist() for row, ids in zip(scores, token_ids, strict=True)]

    # ── files ───────────────────────────────────────────────────────────────────────────────────────

    def save(self, run: str, staging_dir: str) -> None:
        """Write the run's checkpoint files (see `Learner`) on rank 0; the caller makes them durable."""
        learner = self._learner(run)
        if self._rank == 0:
            learner.save(Path(staging_dir), self._base_model)

    def export_merged(self, run: str, directory: str, dtype: str) -> dict[str, float]:
        """Write base + adapter on rank 0 as a complete model directory in the engine's `dtype`.

        Weights that no adapter touches are written by the first export only; later ones on the same
        filesystem hard-link them, so keep the last export until the next one is written.
        """
        started = time.perf_counter()
        tensors = merged_tensors(self._policy.model, self._learner(run).adapter)
        if self._rank == 0:
            target = Path(directory)
            source = self._frozen_exports.get(_DTYPES[dtype])
            export = MergedExport(target, self._base_directory, _DTYPES[dtype], source)
            self._frozen_exports[_DTYPES[dtype]] = export.write(tensors)
        else:
            for _ in tensors:  # gathering is a collective: take part, keep nothing
                pass
        return {"time/export_seconds": time.perf_counter() - started}

    def info(self) -> dict[str, Any]:
        """Describe this rank and its runs, for health and logs."""
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "base_model": self._base_model,
            "device": str(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "num_threads": torch.get_num_threads(),
            "load_seconds": self._load_seconds,
            "runs": {
                run: {"step": learner.step, "lora": asdict(learner.adapter.settings)}
                for run, learner in self._learners.items()
            },
        }

    def shutdown(self) -> None:
        """Leave the process group, so that the other ranks do not wait for this one."""
        if self._world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _sum_gradients(gradients: list[Tensor]) -> None:
    """Sum gradients over the ranks in one all-reduce."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
