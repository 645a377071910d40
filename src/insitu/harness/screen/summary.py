"""Summary: the result of a run, and the commands to use next."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Literal

from insitu.errors import InsituError
from insitu.harness.gains.gain import Gain
from insitu.harness.gains.measurement import plus_minus
from insitu.harness.rollouts.capture import Capture
from insitu.harness.screen.safe_output import printable
from insitu.harness.screen.vllm_flags import SERVER, adapter_flags

_EXIT_CODES = {"succeeded": 0, "failed": 1, "interrupted": 130}
ADAPTER_CONFIG, BASE_MODEL = "adapter_config.json", "base_model_name_or_path"
"""The file of an adapter, and its field, that say which model it belongs to."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a run."""

    outcome: Literal["succeeded", "failed", "interrupted"]
    reason: str
    """Why it failed or stopped early; may be empty."""
    run_id: str
    epochs_done: int
    num_epochs: int
    updates: int
    """Training steps that succeeded."""
    reward_before: float | None
    """On the validation data, before the first update; None without validation data."""
    reward_after: float | None
    """On the same data, after the last update."""
    best_step: int | None
    """0 when the untrained model was best; None when nothing was compared."""
    best_reward: float | None
    checkpoint_path: str | None
    """Directory of the best checkpoint, on the backend's machine."""
    base_model: str
    """As the backend names it."""
    model_name: str
    gateway_url: str
    output_dir: str
    resume_command: str
    lora_rank: int = 16
    calls: Capture | None = None
    """The model calls of all epochs; None when no epoch has counted them."""
    error_before: float | None = None
    """The standard error of `reward_before`."""
    error_after: float | None = None
    best_remeasured: str = ""
    """The reward of the best step when it was measured again, with its standard error."""
    gain: Gain | None = None
    """The comparison of the best step with the model before training; None if it was not measured."""
    base_path: str | None = None
    """Directory or hub id of the base model; None if the checkpoint's files are on another machine."""
    verdict: str = ""
    """The last one, in a sentence; empty if no step is over."""
    cause: InsituError | None = None
    """The error that ended the run; None if it succeeded, was interrupted, or failed without one."""


def exit_code(summary: Summary) -> int:
    """Return 0 only for a run that succeeded."""
    return _EXIT_CODES[summary.outcome]


def lines(summary: Summary, *, next_commands: bool = True) -> list[str]:
    """Return the lines to print at the end; without `next_commands` only what the run came to."""
    return [*_headline(summary), *_results(summary), *(_commands(summary) if next_commands else [])]


def _headline(summary: Summary) -> list[str]:
    reason = printable(summary.reason)
    epochs, updates = _count(summary.num_epochs, "epoch"), _count(summary.updates, "update")
    run = f"Run {summary.run_id}: {summary.epochs_done} of {epochs}, {updates}."
    # Verbatim, because it is meant to be copied.
    resume = f"  {summary.resume_command}"
    if summary.outcome == "failed":
        advice = "Fix the cause, then continue where it stopped (finished work is kept):"
        return [f"FAILED - {reason or 'no reason given'}", run, advice, resume]
    why = f" ({reason})" if reason else ""
    if summary.outcome == "interrupted":
        return [f"Interrupted{why}. {run} Finished work is kept; continue with:", resume]
    return [f"Finished{why}. {run}"]


def _results(summary: Summary) -> list[str]:
    rows = [("validation reward", _change(summary))]
    if best := _best(summary):
        rows.append(("best checkpoint", best))
    if summary.gain is not None:
        rows.append(("gain", summary.gain.sentence("step 0", f"step {summary.best_step}")))
    if summary.calls is not None:
        rows.append(("model calls", summary.calls.line().removeprefix("calls ")))
    if summary.verdict:
        rows.append(("verdict", printable(summary.verdict)))
    rows.append(("results", printable(summary.output_dir)))
    return [f"  {name:<19}{text}" for name, text in rows]


def _change(summary: Summary) -> str:
    before, after = summary.reward_before, summary.reward_after
    if before is None and after is None:
        return "no validation data" if summary.outcome == "succeeded" else "not measured"
    if before is None or after is None:
        if before is not None:
            return f"{plus_minus(before, summary.error_before, 4)} before, not measured after"
        return f"{plus_minus(after or 0.0, summary.error_after, 4)} after, not measured before"
    change = f"{after - before:+.4f}"
    if before > 0 and after > 0:
        change += f", {after / before:.2f} times"
    shown = plus_minus(before, summary.error_before, 4), plus_minus(after, summary.error_after, 4)
    return f"{shown[0]} before, {shown[1]} after ({change})"


def _best(summary: Summary) -> str | None:
    if summary.updates == 0 and not summary.best_step:
        return "none: no update was made"
    if summary.best_step is None:
        return None
    reward = "" if summary.best_reward is None else f", reward {summary.best_reward:.4f}"
    if summary.best_step == 0:
        return f"none: the model was best before training{reward}"
    if summary.best_remeasured:
        reward = f", reward {summary.best_remeasured} measured again ({summary.best_reward:.4f} when chosen)"
    where = f", {printable(summary.checkpoint_path)}" if summary.checkpoint_path else ""
    return f"step {summary.best_step}{reward}{where}"


def _commands(summary: Summary) -> list[str]:
    if not summary.updates and not summary.best_step:
        return []
    commands = [
        "Query its newest step through the gateway:",
        f"  {ask_command(summary.gateway_url, summary.model_name)}",
    ]
    if summary.checkpoint_path and summary.best_step:
        commands += [
            "Serve the best checkpoint with vLLM, on the machine that has its files:",
            f"  {_vllm(summary)}",
        ]
    return commands


def ask_command(gateway_url: str, model: str, question: str = "Hello") -> str:
    """Return the command that asks a model at the gateway."""
    # Not `name@best`: older steps are not served everywhere.
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]})
    url = f"{gateway_url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    # The shell reads the key, so that it never appears on screen.
    headers = "-H \"Authorization: Bearer ${INSITU_API_KEY:-default}\" -H 'Content-Type: application/json'"
    return f"curl {shlex.quote(url)} {headers} -d {shlex.quote(body)}"


def _vllm(summary: Summary) -> str:
    path = f"{(summary.checkpoint_path or '').rstrip('/')}/adapter"
    flags = shlex.join(adapter_flags(summary.model_name, path, summary.lora_rank))
    return f"{shlex.join(SERVER)} --model {_base(summary, path)} {flags}"


def _base(summary: Summary, adapter: str) -> str:
    """Return the base model as a word of the command; the name that the backend serves it by may be none."""
    if summary.base_path is not None:
        return shlex.quote(summary.base_path)
    script = f"import json; print(json.load(open({f'{adapter}/{ADAPTER_CONFIG}'!r}))[{BASE_MODEL!r}])"
    return f'"$(python3 -c {shlex.quote(script)})"'


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
