"""`insitu.finetune`: a run as a Python call, with functions and rows in place of their names.

keyword arguments ─┐
                   ├─► configuration ─► the loop of `insitu finetune` ─► FinetuneResult, or an exception
config.yml ────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from insitu.config.load import CALL, LoadedConfig, load_settings
from insitu.errors import InsituError, InvalidRequest
from insitu.harness.finetune import finetune as run_loop
from insitu.harness.gains.gain import Gain
from insitu.harness.interfaces.progress import Progress
from insitu.harness.screen.console import open_progress
from insitu.harness.screen.safe_output import print_lines
from insitu.harness.screen.summary import Summary, lines

Component: TypeAlias = Callable[..., object] | str | Mapping[str, object]
"""A function, its name, or a mapping as in the YAML."""
Data: TypeAlias = Sequence[object] | Path | Component
"""Rows, a file, or a function that returns rows."""

_AGAIN = f"{CALL}(…) with the same arguments"
_ACCEPT = f"{CALL}(…, accept_changes=True)"


@dataclass(frozen=True, slots=True)
class FinetuneResult:
    """The end of a run that succeeded."""

    run: str
    """Its name, which is also the model's at the gateway; `<run>@<step>` is one step."""
    reason: str
    """The setting that ended it before its last epoch; "" for a run of all epochs."""
    updates: int
    """Training steps of the run."""
    best_step: int | None
    """0 when the untrained model was best; None if no step can be named."""
    best_reward: float | None
    """The best step's validation reward when it was chosen; the gain is measured with new samples."""
    reward_before: float | None
    """The mean reward on the validation data before the first update; None without validation data."""
    error_before: float | None
    """The standard error of `reward_before`."""
    reward_after: float | None
    """On the same data, after the last update."""
    error_after: float | None
    gain: Gain | None
    """The best step, measured again, against the model before training, with its interval."""
    checkpoint: str | None
    """Directory of the best checkpoint, on the backend's machine."""
    output_dir: Path
    """The run's files."""


def finetune(
    *,
    model: str | Mapping[str, object] | None = None,
    agent: Component | None = None,
    data: Data | None = None,
    reward: Component | None = None,
    validation: Data | None = None,
    config: str | Path | None = None,
    accept_changes: bool = False,
    quiet: bool = False,
    **settings: object,
) -> FinetuneResult:
    """Train the model of an agent, as `insitu finetune` does, and return when the run is over.

    `settings` are the other keys of the YAML, `config` is a file that all arguments override. The same call
    resumes a run. Raises InsituError with the cause of a failure, KeyboardInterrupt after Ctrl-C.
    """
    if _loop_is_running():
        raise InvalidRequest(
            f"{CALL} cannot wait inside a running event loop, as in a notebook or an `async def`",
            hint=f"await {CALL}_async(…) with the same arguments",
        )
    return asyncio.run(
        finetune_async(
            model=model,
            agent=agent,
            data=data,
            reward=reward,
            validation=validation,
            config=config,
            accept_changes=accept_changes,
            quiet=quiet,
            **settings,
        )
    )


async def finetune_async(
    *,
    model: str | Mapping[str, object] | None = None,
    agent: Component | None = None,
    data: Data | None = None,
    reward: Component | None = None,
    validation: Data | None = None,
    config: str | Path | None = None,
    accept_changes: bool = False,
    quiet: bool = False,
    **settings: object,
) -> FinetuneResult:
    """Do what `finetune` does, within a running event loop; cancelling it stops the run and cleans up."""
    keys: dict[str, object] = {"model": model, "agent": agent, "data": data, "reward": reward}
    loaded = load_settings({**keys, "validation": validation, **settings}, config)
    summary = await _summary(loaded, accept_changes=accept_changes, quiet=quiet)
    match summary.outcome:
        case "interrupted":
            raise asyncio.CancelledError
        case "failed":
            raise _failure(summary)
        case "succeeded":
            return _result(summary)


async def _summary(loaded: LoadedConfig, *, accept_changes: bool, quiet: bool) -> Summary:
    with nullcontext(Progress()) if quiet else open_progress() as progress:
        summary = await run_loop(
            loaded, progress, _AGAIN, accept_changes=accept_changes, accept_command=_ACCEPT
        )
    if not quiet and summary.outcome == "succeeded":
        print_lines(lines(summary))
    return summary


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _failure(summary: Summary) -> InsituError:
    error = summary.cause or InsituError(summary.reason)
    error.add_note(
        f"Run {summary.run_id}, {summary.updates} updates, files in {summary.output_dir}. "
        f"Finished work is kept: fix the cause, then {_AGAIN} continues where it stopped."
    )
    return error


def _result(summary: Summary) -> FinetuneResult:
    return FinetuneResult(
        run=summary.model_name,
        reason=summary.reason,
        updates=summary.updates,
        best_step=summary.best_step,
        best_reward=summary.best_reward,
        reward_before=summary.reward_before,
        error_before=summary.error_before,
        reward_after=summary.reward_after,
        error_after=summary.error_after,
        gain=summary.gain,
        checkpoint=summary.checkpoint_path,
        output_dir=Path(summary.output_dir).resolve(),
    )
