"""`insitu finetune`: train the model of an agent."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from insitu.cli.options.config_options import override_option

if TYPE_CHECKING:
    from insitu.config.load import LoadedConfig

Result = TypeVar("Result")
ACCEPT_CHANGES = "--accept-changes"


@click.command()
@click.option(
    "--config_file",
    "--config-file",
    required=True,
    type=click.Path(path_type=Path),
    help="Your configuration, in YAML.",
)
@click.option("--dataset", help="Train on this file instead of eval.general.dataset.")
@click.option(
    "--result_json_path",
    "--result-json-path",
    help="JSONPath of the answer in the response of --endpoint. Default: $, the whole response.",
)
@click.option("--endpoint", help="Call the agent at this URL instead of running `workflow`.")
@click.option(
    "--endpoint_timeout",
    "--endpoint-timeout",
    type=float,
    help="Seconds that --endpoint may take to answer. Default: 300.",
)
@override_option
@click.option("--validation_dataset", "--validation-dataset", help="Validate on this dataset.")
@click.option(
    "--validation_interval", "--validation-interval", type=int, help="Epochs between validations. Default: 5."
)
@click.option(
    "--validation_steps",
    "--validation-steps",
    type=int,
    help="Updates between validations, besides --validation_interval. Default: off.",
)
@click.option(
    "--validation_config_file",
    "--validation-config-file",
    help="Validate with the workflow, reward and dataset of this configuration.",
)
@click.option(
    "--validation_samples",
    "--validation-samples",
    type=int,
    help="Rollouts of each validation example. Default: 1.",
)
@click.option(
    "--validation_temperature",
    "--validation-temperature",
    type=float,
    help="Temperature of validations, 0 for greedy answers. Default: that of `llms`.",
)
@click.option(
    ACCEPT_CHANGES,
    is_flag=True,
    help="Resume although the agent, the reward or a dataset has been edited since the run used it.",
)
@click.option("--dry-run", is_flag=True, help="Check everything and show what would run, without running it.")
@click.option(
    "--show-config",
    is_flag=True,
    help="With --dry-run: print the whole configuration too, with every default and without secrets.",
)
@click.option("--no-next-commands", is_flag=True, hidden=True, help="For callers that print their own.")
def finetune(
    config_file: Path,
    override: tuple[tuple[str, str], ...],
    accept_changes: bool,
    dry_run: bool,
    show_config: bool,
    no_next_commands: bool,
    **given: str | float | None,
) -> None:
    """Run your agent on a dataset, score its answers, train its model, and repeat.

    Run the same command again to resume an interrupted run. Exit codes: 0 trained, 1 failed,
    130 interrupted.
    """
    import asyncio
    import sys

    from insitu.config.load import load_config
    from insitu.harness.options import with_options

    if show_config and not dry_run:
        raise click.UsageError("--show-config needs --dry-run")
    loaded = with_options(load_config(config_file, override), {"config_file": str(config_file), **given})
    if dry_run:
        from insitu.harness.dry_run import dry_run as check

        sys.exit(0 if asyncio.run(check(loaded, click.echo, show_config=show_config)) else 1)
    sys.exit(_run(loaded, accept_changes=accept_changes, next_commands=not no_next_commands))


def resume_arguments(given: Sequence[str]) -> list[str]:
    """Return the arguments that resume a run; changes to come have to be accepted anew."""
    return [word for word in given if word != ACCEPT_CHANGES]


def _run(loaded: LoadedConfig, *, accept_changes: bool, next_commands: bool) -> int:
    import asyncio
    import shlex
    import sys

    from insitu.harness.files.redaction import Redaction
    from insitu.harness.finetune import finetune as run
    from insitu.harness.screen.console import open_progress
    from insitu.harness.screen.safe_output import print_lines
    from insitu.harness.screen.summary import exit_code, lines

    given = Redaction(loaded.config).hide_arguments(resume_arguments(sys.argv[1:]))
    command = shlex.join(["insitu", *given])
    with open_progress() as progress:
        try:
            summary = asyncio.run(until_signal(run(loaded, progress, command, accept_changes=accept_changes)))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None  # stopped before the run directory was opened
    print_lines(lines(summary, next_commands=next_commands))
    return exit_code(summary)


async def until_signal(running: Coroutine[None, None, Result]) -> Result:
    """Cancel the run on Ctrl-C or SIGTERM so that it cleans up; a second signal ends the process at once."""
    import asyncio
    import signal

    task, loop = asyncio.ensure_future(running), asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return await task
