"""One rank of the trainer: the base model once, the runs' adapters on it, one training step at a time.

Every method is called on all ranks at once; with several ranks each is a collective. The supervisor plans a
step once and sends each rank its own micro-batches, so ranks exchange only gradients, sums and (if the base
is sharded) weights::

    sequences ─► plan ─► rank 0: micro-batch, micro-batch, …  ─┐
                    └──► rank 1: micro-batch, filler, …       ─┴► Σ gradients ─► the same step everywhere
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh

from insitu.backend.fleet.collective import Collective
from insitu.backend.fleet.rank_info import RankInfo
from insitu.backend.fleet.scorer import Scorer
from insitu.errors import InvalidRequest, NotFound
from insitu.training.batching import collate, filler, score_batch
from insitu.training.learner import Learner
from insitu.training.loss import Totals
from insitu.training.model.export import MergedExport
from insitu.training.model.loading import load_policy, model_directory
from insitu.training.model.lora import AdapterPool, merged_tensors
from insitu.training.model.residence import free_device, move, num_bytes
from insitu.training.objective import objective_of
from insitu.training.packing import Limits, RankBatch, plan
from insitu.training.passes import Passes, step_metrics
from insitu.training.step import Update, optimizer_step
from insitu.types import LoraSettings, StepSettings

log = logging.getLogger(__name__)

_RUNS_SHARE = 8
"""In RAM, open runs may take this part of the base model's memory."""
_RUNS_LEAST_BYTES = 2**30
"""And this much in any case."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TrainerRank:
    """One trainer rank. `dtype` is the precision of the base model, as in the engine, and of matrix products
    (autocast); adapters, their gradients and the optimizer are float32."""

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
        checkpoint_layers: bool = False,
        four_bit: bool = False,
        kept_tokens: int = 0,
    ) -> None:
        if dtype not in _DTYPES:
            raise InvalidRequest(f"dtype {dtype!r} is unknown", hint=f"one of {', '.join(_DTYPES)}")
        torch.set_num_threads(num_threads)
        self._ranks = Collective(rank, world_size)
        self._base_model = base_model
        self._base_directory = model_directory(base_model)
        self._dtype = _DTYPES[dtype]
        self._device = torch.device(device)
        started = time.perf_counter()
        mesh = None
        if world_size > 1:
            self._ranks.join(self._device, master_address, master_port)
            mesh = init_device_mesh(self._device.type, (world_size,))
        self._policy = load_policy(
            base_model, self._device, self._dtype, mesh, checkpoint_layers, four_bit, kept_tokens
        )
        self._limits = Limits(
            self._policy.model.get_input_embeddings().weight.shape[0],
            getattr(self._policy.model.config.get_text_config(), "max_position_embeddings", None),
            max_micro_batch_tokens,
            self._policy.can_branch,
        )
        self._runs_bytes = runs_bytes(self._device, num_bytes(self._policy.model.parameters()))
        self._adapters = AdapterPool(self._policy.model)
        self._scorer = Scorer(self._policy, self._adapters, self._device, self._dtype)
        self._learners: dict[str, Learner] = {}
        """The open runs; the one that was used last comes last."""
        self._frozen_exports: dict[torch.dtype, Path] = {}
        self._token_logprobs = torch.empty(0)
        self._load_seconds = time.perf_counter() - started
        log.info("rank %d/%d loaded %s in %.1f s", rank, world_size, base_model, self._load_seconds)

    # ── runs ────────────────────────────────────────────────────────────────────────────────────────

    def open_run(self, run: str, lora: LoraSettings, checkpoint_dir: str | None = None) -> int:
        """Open the run with a fresh adapter and optimizer, or a checkpoint's; replace it if already open.

        Return its step.
        """
        with self._opened(run, lora) as learner:
            if checkpoint_dir is not None:
                learner.load(Path(checkpoint_dir))
        return learner.step

    def start_run(self, run: str, lora: LoraSettings, source_dir: str, whole: bool) -> None:
        """Open the run at step 0 with the adapter in `source_dir`; `whole`: and with its optimizer."""
        with self._opened(run, lora) as learner:
            learner.start_from(Path(source_dir), whole=whole)

    @contextmanager
    def _opened(self, run: str, lora: LoraSettings) -> Iterator[Learner]:
        """Fill a fresh learner inside this block, after which the run is open; a failure leaves nothing."""
        self.close_run(run)
        with ExitStack() as on_failure:
            learner = Learner(run, self._adapters.add(lora))
            on_failure.callback(self._adapters.remove, learner.adapter)
            yield learner
            on_failure.pop_all()
        self._learners[run] = learner

    def close_run(self, run: str) -> None:
        """Free the run's adapter and optimizer; do nothing if the run is not open."""
        learner = self._learners.pop(run, None)
        if learner is not None:
            self._adapters.remove(learner.adapter)

    def make_room(self, run: str) -> list[str]:
        """Close the other runs that were not used for longest, while all take more than their memory.

        Return them. The checkpoints of their last steps bring them back, bit for bit.
        """
        closed: list[str] = []
        taken = sum(learner.num_bytes for learner in self._learners.values())
        for name in [name for name in self._learners if name != run]:
            if taken <= self._runs_bytes:
                break
            taken -= self._learners[name].num_bytes
            self.close_run(name)
            closed.append(name)
        return closed

    def _learner(self, run: str) -> Learner:
        if run not in self._learners:
            raise NotFound(
                f"run {run} is not open on rank {self._ranks.rank}; open are {sorted(self._learners)}",
                hint="open_run first",
            )
        self._learners[run] = self._learners.pop(run)
        return self._learners[run]

    # ── learning ────────────────────────────────────────────────────────────────────────────────────

    def train_step(
        self,
        run: str,
        batch: RankBatch,
        settings: StepSettings,
        reference_dir: str | None = None,
    ) -> dict[str, float]:
        """Train one step on this rank's micro-batches: `num_passes` updates. Return the finite metrics.

        If no rank has a sequence, weights and moments do not change at all; a gradient that is not finite
        ends the step without its update. `reference_dir` is the checkpoint of the reference (of the KL
        penalty, of dpo, or the teacher), of any run; without it the base model is the reference.
        """
        started = time.perf_counter()
        learner, objective = self._learner(run), objective_of(settings)
        batches = [collate(part).to(self._device) for part in batch.parts()]
        scale = self._loss_scale(learner)
        passes = Passes(batches, batch.num_rollouts, objective, settings, self._ranks.add_up, scale)
        reference = None if reference_dir is None else Path(reference_dir)
        counts = batch.counts
        totals, updates = (
            self._learn(learner, passes, settings, reference) if counts.num_sequences else ([], [])
        )
        self._token_logprobs = passes.logprobs() if totals else torch.empty(0)
        learner.step += 1
        seconds = time.perf_counter() - started
        speed = {"time/train_seconds": seconds, "tokens_per_second": counts.num_input_tokens / seconds}
        metrics = step_metrics(totals, counts.num_tokens, settings.method)
        metrics |= asdict(counts) | _update_metrics(updates) | speed
        metrics["learning_rate"] = settings.learning_rate
        if self._dtype is torch.float16:
            metrics["loss_scale"] = scale
        return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}

    def token_logprobs(self) -> NDArray[np.float32]:
        """Return the log-probabilities of the last step's tokens on this rank, before its first update."""
        logprob_t, self._token_logprobs = self._token_logprobs, torch.empty(0)
        return logprob_t.float().cpu().numpy()

    def _learn(
        self, learner: Learner, passes: Passes, settings: StepSettings, reference: Path | None
    ) -> tuple[list[Totals], list[Update]]:
        """Run the passes, with an update after each. On failure nothing of the run stays in memory."""
        totals: list[Totals] = []
        updates: list[Update] = []
        with ExitStack() as on_failure:
            on_failure.callback(self.close_run, learner.run)
            self._adapters.activate(learner.adapter)
            with learner.rng(), self._scorer.reference(learner.adapter, reference) as score_reference:
                while len(updates) < settings.num_passes:
                    totals.append(passes.run(self._scorer.score, score_reference))
                    updates.append(self._update(learner, settings))
                    if updates[-1].skipped:
                        break
            on_failure.pop_all()
        self._after_updates(learner, updates)
        return totals, updates

    def _after_updates(self, learner: Learner, updates: Sequence[Update]) -> None:
        """Adapt the loss scale of float16, and say that an update was skipped."""
        before = self._loss_scale(learner)
        if self._dtype is torch.float16:
            for update in updates:
                learner.loss_scale = learner.loss_scale.after(skipped=update.skipped)
        if updates[-1].skipped:
            after = self._loss_scale(learner)
            scale = "" if after == before else f"; the loss scale goes from {before:g} to {after:g}"
            log.warning(
                "run %s: an update of step %d was skipped, its gradient is not finite%s",
                learner.run,
                learner.step + 1,
                scale,
            )

    def _loss_scale(self, learner: Learner) -> float:
        """Return the factor of the loss: without one, small gradients would underflow in float16."""
        return learner.loss_scale.value if self._dtype is torch.float16 else 1.0

    def _update(self, learner: Learner, settings: StepSettings) -> Update:
        parameters = list(learner.parameters.values())
        self._ranks.add_up_all([p.grad for p in parameters if p.grad is not None])
        return optimizer_step(parameters, learner.optimizer, settings, self._loss_scale(learner))

    @torch.no_grad()
    def score(self, run: str, token_ids: list[list[int]], adapter: bool = True) -> list[list[float]]:
        """Return each token's log-probability from the second on, under the run's policy or just the base."""
        self._adapters.activate(self._learner(run).adapter)
        score = self._scorer.score if adapter else self._scorer.score_base
        wanted = [i for i, ids in enumerate(token_ids) if len(ids) > 1]
        batches = plan(
            [len(token_ids[i]) for i in wanted], self._limits.max_micro_batch_tokens, self._ranks.world_size
        )
        width = max((len(ids) for ids in token_ids), default=0)
        scores = torch.zeros(len(token_ids), width, device=self._device)
        for places in batches[self._ranks.rank]:
            rows = [wanted[place] for place in places]
            batch = score_batch([token_ids[i] for i in rows]) if rows else filler()
            logprob_t, _ = score(batch.to(self._device))
            for i, part in zip(
                rows, logprob_t.split([len(token_ids[i]) - 1 for i in rows] or [1]), strict=False
            ):
                scores[i, : len(part)] = part
        self._ranks.add_up(scores)  # every entry is zero on all ranks but one
        return [row[: max(0, len(ids) - 1)].tolist() for row, ids in zip(scores, token_ids, strict=True)]

    # ── the device ──────────────────────────────────────────────────────────────────────────────────

    def off_device(self) -> None:
        """Move base, adapters and moments to host memory and free the device's; nothing on a CPU."""
        if self._device.type != "cpu":
            self._move(torch.device("cpu"))
            free_device()

    def on_device(self) -> None:
        """Move them back to the device, bit for bit."""
        if self._device.type != "cpu":
            self._move(self._device)

    def _move(self, device: torch.device) -> None:
        move(self._policy, [learner.optimizer for learner in self._learners.values()], device)

    # ── files ───────────────────────────────────────────────────────────────────────────────────────

    def save(self, run: str, staging_dir: str) -> None:
        """Write the run's checkpoint files (see `Learner`) on rank 0; the caller makes them durable."""
        learner = self._learner(run)
        if self._ranks.rank == 0:
            learner.save(Path(staging_dir), self._base_model)

    def export_merged(self, run: str, directory: str, dtype: str) -> dict[str, float]:
        """Write base + adapter on rank 0 as a complete model directory in the engine's `dtype`.

        The same step of a run gives the same bytes, whenever it is exported.
        Weights that no adapter touches are written by the first export only; later ones on the same
        filesystem hard-link them, so keep the last export until the next one is written.
        """
        started = time.perf_counter()
        learner, target = self._learner(run), _DTYPES[dtype]
        tensors = merged_tensors(self._policy.model, learner.adapter)
        frozen_source = self._frozen_exports.get(target)
        export = MergedExport(run, learner.step, Path(directory), self._base_directory, target, frozen_source)
        with_frozen = torch.zeros(1, device=self._device)
        if self._ranks.rank == 0:
            with_frozen += export.begin(tensors)
        self._ranks.add_up(with_frozen)
        if self._ranks.rank == 0:
            self._frozen_exports[target] = export.write(tensors, bool(with_frozen))
        else:
            for tensor in tensors:  # gathering is a collective: take part, keep nothing
                if tensor.is_adapted or with_frozen:
                    tensor.gather()
        return {"time/export_seconds": time.perf_counter() - started}

    def info(self) -> RankInfo:
        """Describe this rank and its runs, for health and logs."""
        return {
            "rank": self._ranks.rank,
            "world_size": self._ranks.world_size,
            "base_model": self._base_model,
            "device": str(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "num_threads": torch.get_num_threads(),
            "load_seconds": self._load_seconds,
            "vocabulary_size": self._limits.vocabulary_size,
            "max_length": self._limits.max_length,
            "max_micro_batch_tokens": self._limits.max_micro_batch_tokens,
            "can_branch": self._limits.can_branch,
            "linear_layers": sorted(self._adapters.linear_layers),
            "runs": {
                run: {"step": learner.step, "lora": asdict(learner.adapter.settings)}
                for run, learner in self._learners.items()
            },
        }


def runs_bytes(device: torch.device, base_bytes: int) -> int:
    """Return what open runs may take beside a base of so many bytes; the run that trains stays in any case.

    The memory plan of a GPU counts one run, so on a GPU there is no other.
    """
    return max(_RUNS_LEAST_BYTES, base_bytes // _RUNS_SHARE) if device.type == "cpu" else 0


def _update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    return {
        "updated": int(any(not update.skipped for update in updates)),
        "skipped": sum(update.skipped for update in updates),
        "grad_norm": updates[0].grad_norm if updates else 0.0,
    }
