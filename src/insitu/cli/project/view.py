"""`insitu view`: look at runs in a browser."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; by default a free one."
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of the model's tokenizer.json, to show tokens as text if the model is elsewhere.",
)
def view(directory: Path, port: int, no_browser: bool, tokenizer: Path | None) -> None:
    """Look at runs in a browser: curves, rollouts, every token, and what each group taught.

    DIRECTORY is the finetuning.output_dir of a run, its configuration file, or a directory that holds runs.
    You may look at a run while it is under way; nothing of it is changed, and nothing that it names is
    executed. Only this machine can open the pages. With the configuration file, started where
    `insitu finetune` was, it can also score a group again with an edited reward, and go on from a fork with
    any kept step.
    """
    from insitu.view.http.server import serve

    def ready(address: str) -> None:
        click.echo(f"{directory}: {address} (Ctrl-C ends it)")
        if not no_browser:
            import webbrowser

            webbrowser.open(address)

    config_file = directory if directory.is_file() else None
    serve(run_root(directory), port, tokenizer=tokenizer, ready=ready, config_file=config_file)


def run_root(directory: Path) -> Path:
    """Return the directory of runs that the user named, maybe by a configuration file."""
    if not directory.is_file():
        return directory
    from insitu.config.load import load_config

    return load_config(directory).config.finetuning.output_dir
