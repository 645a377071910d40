"""A step that fails leaves nothing behind: real Ray and real ranks; the next step is as if unbroken."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.torch import load_file

from insitu.backend.fleet.cluster import ActorDied, start_ray, stop_ray
from insitu.backend.fleet.trainer import TrainerGroup, _RankActor
from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.settings import Deadlines, ServeSettings
from insitu.errors import ChildFailed, DeadlineExceeded, InsituError
from insitu.testing.models import tiny
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.support.sequences import make_sequence

pytestmark = pytest.mark.timeout(300)

LORA = LoraSettings(rank=4, seed=1)
SETTINGS = StepSettings(learning_rate=1e-2)


class StandinFaultyActor(_RankActor):
    """A real rank that fails in a training step in the way that a file asks for, once."""

    def do(self, method: str, *args: object) -> object:
        order = Path(os.environ["INSITU_TEST_FAULT"])
        if method == "train_step" and self._rank._ranks.rank == 1 and order.exists():
            fault = order.read_text()
            order.unlink()
            if fault == "dies":
                os._exit(1)
            if fault == "hangs":
                time.sleep(600)
            self._fail_at_the_second_micro_batch()
        return super().do(method, *args)

    def _fail_at_the_second_micro_batch(self) -> None:
        from insitu.training import passes

        real, calls = passes.forward_backward, iter([False, True])

        def failing(*args: Any, **kwargs: Any) -> Any:
            if next(calls):
                passes.forward_backward = real
                raise RuntimeError("out of memory")
            return real(*args, **kwargs)

        passes.forward_backward = failing


def sequences(step: int) -> list[TrainingSequence]:
    """Two long rollouts and two short ones: several micro-batches on each rank."""
    made: list[TrainingSequence] = []
    for i in range(6):
        ids = [3 + (step * 31 + i * 17 + j * 7) % 1000 for j in range(1200)]
        mask = [0] * 1100 + [1] * 100
        made.append(
            make_sequence(f"r{step}-{i}", ids, mask, [-5.0 * m for m in mask], 1.0 if i % 2 else -1.0)
        )
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    scratch = tmp_path_factory.mktemp("ray")
    os.environ["INSITU_TEST_FAULT"] = str(scratch / "fault")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    start_ray(None, scratch, scratch)
    try:
        yield scratch
    finally:
        stop_ray()
        del os.environ["INSITU_TEST_FAULT"]


def trainer(scratch: Path, step_seconds: float = 120) -> TrainerGroup:
    settings = ServeSettings(
        scratch / "state",
        "cpu",
        choose(read_cpu(), "cpu", Asked(dtype="float32"), num_ranks=2),
        "merged",
        "shared",
        "default",
        num_ranks=2,
        deadlines=Deadlines(step=step_seconds),
    )
    settings.logs_dir.mkdir(parents=True, exist_ok=True)
    return TrainerGroup(settings, str(tiny()), StandinFaultyActor)


async def unbroken(group: TrainerGroup, out: Path) -> None:
    """Two steps, saved after each."""
    for step in range(2):
        await group.open_run("run", LORA, step, out / str(step) if step else None)
        await group.train_step("run", sequences(step), SETTINGS, None)
        await group.save("run", out / str(step + 1))


async def broken(group: TrainerGroup, out: Path, fault: Path, kind: str) -> InsituError:
    """The same with a fault in the second step, which is then done again from the first one's checkpoint."""
    await group.open_run("run", LORA, 0, None)
    await group.train_step("run", sequences(0), SETTINGS, None)
    await group.save("run", out / "1")
    fault.write_text(kind)
    began = time.monotonic()
    with pytest.raises(InsituError) as raised:
        await group.train_step("run", sequences(1), SETTINGS, None)
    assert time.monotonic() - began < 30, "the others waited for the rank that failed"
    assert "run" not in group.opened
    if not group.running:
        await group.start()
    await group.open_run("run", LORA, 1, out / "1")
    await group.train_step("run", sequences(1), SETTINGS, None)
    await group.save("run", out / "2")
    return raised.value


@pytest.mark.parametrize(
    ("kind", "error", "step_seconds"),
    [
        pytest.param("fails", ChildFailed, 120, marks=pytest.mark.sweep),
        ("dies", ActorDied, 120),
        pytest.param("hangs", DeadlineExceeded, 15, marks=pytest.mark.sweep),
    ],
)
async def test_failed_step_leaves_nothing(
    cluster: Path, tmp_path: Path, kind: str, error: type[InsituError], step_seconds: float
) -> None:
    group = trainer(cluster, step_seconds)
    await group.start()
    try:
        await unbroken(group, tmp_path / "unbroken")
        await group.forget_run("run")
        raised = await broken(group, tmp_path / "broken", cluster / "fault", kind)
    finally:
        await group.stop()
    assert isinstance(raised, error)
    files = [tmp_path / way / "2" / "adapter" / "adapter_model.safetensors" for way in ("unbroken", "broken")]
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours), "the failed step left something behind"
