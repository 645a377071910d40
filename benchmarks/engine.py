"""An engine for benchmarks, started as `insitu serve` starts it on this machine, without insitu around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from insitu.backend.plan.compute import Asked, Compute, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.engine import EngineSettings
from insitu.system.paths import cache_dir
from insitu.system.processes import end_child, free_port, spawn
from insitu.testing.models import smollm2
from tests.support.vllm_server import wait_ready

MAX_LENGTH, MAX_NUM_SEQS = 256, 128


def this_machine() -> Compute:
    """Return what `insitu serve` chooses on this machine."""
    return choose(read_cpu(), "cpu", Asked())


@contextlib.contextmanager
def bare_engine(scratch: Path, niceness: int = 0, kv_cache_gib: int = 2) -> Iterator[str]:
    """Start a vLLM with SmolLM2 and yield its address."""
    compute = this_machine()
    settings = EngineSettings(
        str(smollm2()),
        "smollm2",
        "cpu",
        compute.dtype,
        "merged",
        max_model_len=MAX_LENGTH,
        max_num_seqs=MAX_NUM_SEQS,
        block_size=compute.block_size,
        kv_cache_gib=kv_cache_gib,
    )
    port, log = free_port(), scratch / f"engine-{niceness}.log"
    env = {**settings.environment(), "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "torchinductor")}
    env |= compute.engine_threads[0].environment()
    server = spawn(["nice", "-n", str(niceness), *settings.command(port)], log, env)
    # Where the kernel schedules sessions as groups, the group's niceness counts too.
    with contextlib.suppress(OSError):
        Path(f"/proc/{server.pid}/autogroup").write_text(str(niceness))
    try:
        wait_ready(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        end_child(server, 10)
