"""`insitu try`: a few rollouts and rewards, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import click

from insitu.cli.options.config_options import chosen_config, config_argument, config_option, override_option


@click.command("try")
@config_argument
@config_option
@click.option(
    "--limit", type=click.IntRange(min=1), default=2, show_default=True, help="Try this many examples."
)
@override_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def try_(
    config: Path | None,
    config_file: Path | None,
    limit: int,
    override: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:
    """Run your agent on a few examples and score its answers; train nothing and write nothing.

    The model is the one that CONFIG names, at `insitu serve` or at any server of the OpenAI protocol.
    Exit codes: 0 all is well, 1 the agent or the reward failed, 130 interrupted.
    """
    import asyncio
    import itertools
    import json
    import sys

    from insitu.cli.finetune import until_signal
    from insitu.config.load import load_config
    from insitu.harness.screen.safe_output import print_lines
    from insitu.harness.trial.lines import end_lines, example_lines, start_lines
    from insitu.harness.trial.trial import try_out

    path = chosen_config(config, config_file)
    loaded = load_config(path, override)
    numbers = itertools.count(1)
    stream = sys.stderr if as_json else sys.stdout
    running = try_out(
        loaded,
        limit,
        lambda who: print_lines(start_lines(who), stream),
        lambda tried: print_lines(example_lines(next(numbers), tried), stream),
    )
    try:
        trial = asyncio.run(until_signal(running))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    print_lines(end_lines(trial, str(path)), stream)
    if as_json:
        click.echo(json.dumps(trial.to_dict(), indent=2, ensure_ascii=False))
    sys.exit(0 if trial.ok else 1)
