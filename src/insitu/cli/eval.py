"""`insitu eval`: compare two models on held-out examples."""

from __future__ import annotations

from pathlib import Path

import click

from insitu.cli.options.config_options import override_option


@click.command("eval")
@click.argument("models", nargs=2, metavar="MODEL MODEL")
@click.option(
    "--config_file",
    "--config-file",
    required=True,
    type=click.Path(path_type=Path),
    help="The configuration of `insitu finetune`: its agent, reward and validation dataset.",
)
@click.option("--validation_dataset", "--validation-dataset", help="Compare on this dataset.")
@click.option(
    "--validation_config_file",
    "--validation-config-file",
    help="Compare with the workflow, reward and dataset of this configuration.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Rollouts of each example. Default: validation_samples of the configuration, or 1.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    help="Sampling temperature, 0 for greedy answers. Default: that of `llms`.",
)
@override_option
@click.option(
    "--output_dir",
    "--output-dir",
    type=click.Path(path_type=Path),
    help="Keep the rollouts and the result in this new directory. Default: keep nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def eval(  # noqa: A001 - the command's name
    models: tuple[str, str],
    config_file: Path,
    override: tuple[tuple[str, str], ...],
    samples: int | None,
    temperature: float | None,
    output_dir: Path | None,
    as_json: bool,
    **given: str | None,
) -> None:
    """Measure two models on the validation dataset and say whether the second one is better.

    A MODEL is `base`, a kept step such as `my-run@12`, a directory with an adapter that PEFT wrote,
    or any model behind the OpenAI protocol: ADDRESS#MODEL, or ADDRESS#MODEL#VARIABLE with the
    environment variable that holds its key.
    Nothing is trained.
    """
    import asyncio
    import json
    import sys

    from insitu.cli.finetune import until_signal
    from insitu.config.load import load_config
    from insitu.harness.evaluate import evaluate
    from insitu.harness.options import with_options
    from insitu.harness.screen.comparison_table import comparison_lines
    from insitu.harness.screen.console import open_progress
    from insitu.harness.screen.safe_output import print_lines

    options = {"validation_samples": samples, "validation_temperature": temperature, **given}
    loaded = with_options(load_config(config_file, override), {"config_file": str(config_file), **options})
    with open_progress(sys.stderr) as progress:
        try:
            found = asyncio.run(until_signal(evaluate(loaded, models, progress, output_dir)))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_lines(comparison_lines(found))
