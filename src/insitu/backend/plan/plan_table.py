"""A plan for people: the table of `insitu plan` and `insitu serve`, and the table of cards in the docs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from insitu.backend.plan.cpu_plan import CpuPlan
from insitu.backend.plan.device_plan import make_plan
from insitu.backend.plan.devices.machine import Machine
from insitu.backend.plan.fit import Plan
from insitu.backend.plan.layouts import Wanted, describe
from insitu.backend.plan.memory import GIB, Part, gib
from insitu.errors import CannotHonour
from insitu.training.footprint.shape import ModelShape


def plan_table(plan: Plan) -> Table:
    """Show what each device and the host hold, part by part."""
    size = f"{plan.shape.num_parameters / 1e9:.1f}B parameters"
    table = Table(title=f"{plan.shape.name} ({size}) on {describe(plan.machine)}", title_justify="left")
    table.add_column("memory")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    shared = plan.wanted.placement == "shared"
    awake = "each GPU, engine awake" if shared else "each GPU of an engine"
    training = "each GPU, trainer at its peak" if shared else "each GPU of the trainer"
    device = plan.machine.cuda_bytes
    _add(table, awake, plan.engine, device)
    _add(table, training, plan.trainer, device)
    _add(table, "host RAM", plan.host, plan.machine.host_bytes)
    return table


def plan_lines(plan: Plan) -> Iterable[str]:
    """Say what follows: the settings as options, and what they mean."""
    layout = plan.layout
    checkpoint = "layers are checkpointed" if plan.checkpoint_layers else "layers are not checkpointed"
    if plan.kept_tokens:
        checkpoint += f" in rows of more than {plan.kept_tokens:,} tokens"
    base = ", base in four bits" if plan.wanted.four_bit else ""
    yield f"plan     {' '.join(options(plan))}"
    engines = f"{_count(layout.num_replicas, 'engine')} on {_count(layout.tensor_parallel_size, 'GPU')} each"
    ranks = f"{_count(layout.num_ranks, 'trainer rank')}, {plan.wanted.placement} devices{_idle(plan)}"
    yield f"plan     {engines}, {ranks}; {checkpoint}{base}"
    share = 100 * plan.shape.linear_parameters / plan.shape.num_parameters
    yield f"plan     adapters may sit on layers with {share:.0f} % of the model's weights"
    calls = _count(plan.kv_tokens // plan.max_seq_length, "call")
    yield f"plan     the KV cache of an engine holds {calls} of {plan.max_seq_length:,} tokens"


def options(plan: Plan) -> list[str]:
    """Return the planned settings as options of `insitu serve`."""
    layout = plan.layout
    chosen = [
        f"--replicas {layout.num_replicas}",
        f"--tensor-parallel-size {layout.tensor_parallel_size}",
        f"--trainer-ranks {layout.num_ranks}",
        f"--gpu-memory-utilization {plan.gpu_memory_utilization:g}",
        f"--max-seq-length {plan.max_seq_length}",
        f"--max-num-seqs {plan.max_num_seqs}",
        f"--micro-batch-tokens {plan.micro_batch_tokens}",
    ]
    return [*chosen, "--four-bit-base"] if plan.wanted.four_bit else chosen


def cpu_plan_table(plan: CpuPlan) -> Table:
    """Show what a backend without a GPU takes of the RAM."""
    size = f"{plan.shape.num_parameters / 1e9:.2f}B parameters"
    table = Table(title=f"{plan.shape.name} ({size}) on a CPU in {plan.dtype}", title_justify="left")
    table.add_column("memory")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    _add(table, "RAM", plan.parts, plan.host_bytes)
    return table


def cards_table(shapes: Sequence[ModelShape], cards: Sequence[Machine], wanted: Wanted) -> str:
    """Return a Markdown table: each model's longest sequence on each card, and how the GPUs are divided."""
    names = [_card(machine) for machine in cards]
    lines = [f"| model | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for shape in shapes:
        cells = [_cell(shape, machine, wanted) for machine in cards]
        lines.append(f"| {shape.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(shape: ModelShape, machine: Machine, wanted: Wanted) -> str:
    try:
        plan = make_plan(shape, machine, wanted)
    except CannotHonour:
        return "no"
    layout = plan.layout
    divided = "" if machine.num_devices == 1 else f" ({layout.num_replicas} × {layout.tensor_parallel_size})"
    return f"{plan.max_seq_length:,}{divided}"


def _card(machine: Machine) -> str:
    return f"{machine.num_devices} × {machine.device_bytes / GIB:g} GiB"


def _add(table: Table, where: str, parts: Sequence[Part], there: int | None) -> None:
    for index, part in enumerate(parts):
        table.add_row(where if index == 0 else "", part.name, f"{part.num_bytes / GIB:.1f}")
    total = sum(part.num_bytes for part in parts)
    of = "" if there is None else f" of {gib(there)}"
    table.add_row("", f"together{of}", f"{total / GIB:.1f}", style="bold", end_section=True)


def _idle(plan: Plan) -> str:
    idle = plan.machine.num_devices - plan.layout.used(plan.wanted.placement)
    return f", {_count(idle, 'GPU')} idle" if idle else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
