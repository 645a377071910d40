"""Plan engine and trainer on N equal GPUs: who is where, how long rows may be, what memory each part takes.

A pure function: `make_plan` tries every layout (replicas, tensor parallelism, trainer ranks) that the user's
own settings allow, computes what each device must hold, and returns the best plan that fits. If none does, it
raises with the figures and with the changes that would fit.

With shared placement, engine and trainer are never on a device together: one of them is asleep or offloaded
and leaves only its CUDA context there. Host RAM then holds what is off the devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from insitu.backend.plan.devices.machine import Machine
from insitu.backend.plan.fit import Plan, Shortfall, fit
from insitu.backend.plan.layouts import Wanted, check_wanted, describe, layouts
from insitu.errors import CannotHonour
from insitu.training.footprint.shape import ModelShape

_ENOUGH = 32768
"""Devices are divided for longer sequences only up to this length."""
_MORE_DEVICES = (2, 4, 8)


def make_plan(shape: ModelShape, machine: Machine, wanted: Wanted) -> Plan:
    """Return the best plan; raise CannotHonour with figures and alternatives if none fits."""
    check_wanted(shape, machine, wanted)
    found = _search(shape, machine, wanted)
    if isinstance(found, Plan):
        return found
    asked = f" with --max-seq-length {wanted.max_seq_length}" if wanted.max_seq_length else ""
    raise CannotHonour(
        f"{shape.name}{asked} does not fit on {describe(machine)}, {wanted.placement} devices: {found}",
        hint="; ".join(_alternatives(shape, machine, wanted)) or "choose a smaller model or a larger GPU",
    )


def _search(shape: ModelShape, machine: Machine, wanted: Wanted) -> Plan | Shortfall:
    tried = [fit(shape, machine, wanted, layout) for layout in layouts(shape, machine, wanted)]
    plans = [plan for plan in tried if isinstance(plan, Plan)]
    if plans:
        return max(plans, key=_merit)
    return min((each for each in tried if isinstance(each, Shortfall)), key=lambda each: each.missing)


def _merit(plan: Plan) -> tuple[int, ...]:
    """Prefer much longer sequences, then engines side by side, then more devices, balance and ranks."""
    layout = plan.layout
    return (
        min(plan.max_seq_length, _ENOUGH).bit_length(),  # twice as long counts, a little longer does not
        -layout.tensor_parallel_size,
        layout.used(plan.wanted.placement),
        -abs(layout.engine_devices - layout.num_ranks),
        layout.num_ranks,
    )


def _alternatives(shape: ModelShape, machine: Machine, wanted: Wanted) -> Iterator[str]:
    """Name the single changes that would fit, each planned in full."""
    if machine.used_bytes and _try(shape, replace(machine, used_bytes=0), wanted):
        yield "it fits where no other process has memory: choose such GPUs with CUDA_VISIBLE_DEVICES"
    shorter = replace(wanted, max_seq_length=None, micro_batch_tokens=None)
    if shorter != wanted and (plan := _try(shape, machine, shorter)):
        budget = f" --micro-batch-tokens {plan.micro_batch_tokens}" if wanted.micro_batch_tokens else ""
        yield f"--max-seq-length {plan.max_seq_length}{budget} fits"
    quantised = replace(wanted, four_bit=True, publication="merged")
    if not wanted.four_bit and (plan := _try(shape, machine, quantised)):
        yield f"--four-bit-base --publication merged fits, with sequences of {plan.max_seq_length} tokens"
    if wanted.placement == "shared" and _try(shape, machine, replace(wanted, placement="dedicated")):
        yield "--placement dedicated fits"
    if wanted.placement == "dedicated" and _try(shape, machine, replace(wanted, placement="shared")):
        yield "--placement shared fits"
    free = replace(wanted, num_replicas=None, num_ranks=None, tensor_parallel_size=None)
    if free != wanted and _try(shape, machine, free):
        yield "the planner's own division of the GPUs fits: leave out replicas, ranks and tensor parallelism"
    for count in _MORE_DEVICES:
        if count > machine.num_devices and _try(shape, replace(machine, num_devices=count), free):
            yield f"{count} such GPUs fit"
            return


def _try(shape: ModelShape, machine: Machine, wanted: Wanted) -> Plan | None:
    try:
        check_wanted(shape, machine, wanted)
    except CannotHonour:
        return None
    found = _search(shape, machine, wanted)
    return found if isinstance(found, Plan) else None
