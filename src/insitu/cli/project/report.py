"""`insitu report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--groups",
    "num_groups",
    type=click.IntRange(1, 100),
    default=20,
    show_default=True,
    help="Groups to keep with all their tokens; those whose rewards differ most come first.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of the model's tokenizer.json, to show tokens as text if the model is elsewhere.",
)
def report(directory: Path, out: Path, num_groups: int, tokenizer: Path | None) -> None:
    """Write a run as one HTML file that needs neither a server nor a network.

    DIRECTORY is the finetuning.output_dir of a run, or its configuration file. The file has the same pages
    as `insitu view`, with the questions and answers of some groups: share it only with those who may read
    them.
    """
    from insitu.cli.project.view import run_root
    from insitu.system.durable import write_atomic
    from insitu.view.reports.report import make_report, read_to_the_end
    from insitu.view.run import ViewedRun

    run = ViewedRun("run", run_root(directory), tokenizer=tokenizer)
    try:
        for _ in read_to_the_end(run):
            pass
        made = make_report(run, num_groups)
    finally:
        run.close()
    content = made.text.encode()
    write_atomic(out, content)
    size = f"{len(content) / 2**20:.1f} MiB"
    click.echo(f"{out}: {size}, {made.num_groups} of {made.all_groups} groups with all their tokens")
