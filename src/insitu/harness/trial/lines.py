"""The result of `insitu try` as lines for people."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from insitu.errors import one_line
from insitu.harness.screen.safe_output import visible
from insitu.harness.trial.answering import Answering
from insitu.harness.trial.reward_check import CONSTANT, CONSTANT_ANSWER, EMPTY, GOLD, CheckedExample
from insitu.harness.trial.tried_example import Trial, TriedExample
from insitu.user_traceback import UserTraceback

_MAX_CHARS = 600
"""Of a question or an answer; `--json` has all of it."""


def start_lines(who: Answering) -> list[str]:
    """Say which model answers."""
    if who.gateway is None:
        known = "not a gateway of insitu, so tokens are not known"
    elif who.run is None:
        known = "the base model: the run is not registered yet"
    else:
        known = "the run's newest step"
    return [visible(f"model {who.binding.model} at {who.address} ({known})")]


def example_lines(number: int, tried: TriedExample) -> list[str]:
    """Show one example."""
    lines = ["", f"example {number}: {one_line(tried.id)}"]
    lines += _field("question", tried.input) + _field("expected", tried.expected)
    if tried.failed == "agent":
        lines += _field("FAILED", f"agent ({tried.ending}): {tried.reason}")
    else:
        lines += _field("answer", tried.output)
        if tried.failed:
            lines += _field("FAILED", f"reward: {tried.reason}")
        else:
            lines.append(f"  reward    {tried.reward:g}{_cut_off(tried)}")
    lines.append(f"  took      {_took(tried)}")
    if tried.traceback is not None:
        lines += _indented(tried.traceback)
    if tried.blocked is not None:
        lines.append(f"  BLOCKS    the event loop stood still for {tried.blocked.seconds:.2f} s at")
        lines.append(f"            {visible(tried.blocked.where)}")
    return lines


def end_lines(trial: Trial, config_file: str) -> list[str]:
    """Show what the reward gives made-up answers, what to change, and the next command."""
    lines = ["", "reward of made-up answers"]
    lines += [line for tried in trial.examples for line in _checked_lines(tried.checked)]
    lines += _failures(trial)
    lines += _verdict([tried.checked for tried in trial.examples])
    if any(tried.blocked for tried in trial.examples):
        lines += [
            "",
            "While the event loop stands still, so do all other rollouts. Await an asynchronous client, use",
            "`await asyncio.to_thread(...)`, or write the agent as `def`: it then gets a thread of its own.",
        ]
    lines += [f"note: {visible(note)}" for note in trial.notes]
    file = shlex.quote(config_file)
    again = f"insitu try {file}"
    following = f"insitu finetune --config_file={file} --dry-run"
    return [*lines, "", f"next: {following}" if trial.ok else f"next: repair what FAILED, then {again}"]


def _cut_off(tried: TriedExample) -> str:
    return " (cut off at max_tokens)" if tried.ending == "length" else ""


def _took(tried: TriedExample) -> str:
    parts = [f"{tried.seconds:.2f} s"]
    if tried.num_calls is not None:
        parts.append("1 model call" if tried.num_calls == 1 else f"{tried.num_calls} model calls")
        parts.append(f"{tried.num_output_tokens} tokens")
    return ", ".join(parts)


def _checked_lines(checked: CheckedExample) -> Iterator[str]:
    scores = [
        f"{each.kind} {'FAILED' if each.score is None else format(each.score, 'g')}"
        for each in checked.answers
    ]
    if scores:
        yield f"  {one_line(checked.example_id)}: {', '.join(scores)}"
    if checked.why_not:
        yield f"  {one_line(checked.example_id)}: not checked{' fully' if scores else ''}: {checked.why_not}"


def _failures(trial: Trial) -> Iterator[str]:
    """Show each cause once, unless the agent's own answer showed it already."""
    shown = {tried.traceback.cause for tried in trial.examples if tried.traceback is not None}
    for tried in trial.examples:
        for each in tried.checked.answers:
            if each.error is None:
                continue
            yield f"  FAILED    {visible(f'reward of the {each.kind} answer: {each.error}')}"
            if each.traceback is not None and each.traceback.cause not in shown:
                shown.add(each.traceback.cause)
                yield from _indented(each.traceback)


def _verdict(checked: Sequence[CheckedExample]) -> list[str]:
    known = [each for each in checked if each.told_apart is not None]
    if not known:
        return []
    wrong = [each for each in known if not each.told_apart]
    if not wrong:
        return [f"  The reward tells the gold answer from an empty one and from {CONSTANT_ANSWER!r}."]
    first = wrong[0]
    others = ", ".join(
        f"{kind} {score:g}" for kind in (EMPTY, CONSTANT) if (score := first.score(kind)) is not None
    )
    return [
        f"  WARNING   the reward does not tell them apart for {one_line(first.example_id)}: gold "
        f"{first.score(GOLD):g}, {others}.",
        "            A model trained by it need not answer the question.",
    ]


def _field(name: str, value: object) -> list[str]:
    """Show a value with its further lines below it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]}… ({len(text) - _MAX_CHARS} characters more)"
    first, *rest = visible(text).split("\n")
    return [f"  {name:<9} {first}", *(f"            {line}" for line in rest)]


def _indented(traceback: UserTraceback) -> list[str]:
    return [f"    {line}" for line in visible(traceback.text).split("\n")]
