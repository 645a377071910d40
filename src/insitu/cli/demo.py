"""`insitu demo`: the whole loop on this machine."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default="insitu-demo",
    show_default=True,
    help="Folder for the demo's files; an interrupted demo in it is continued.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory of a model on this machine. Default: SmolLM2-135M-Instruct, which is downloaded once.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="End with one line of figures; all else goes to standard error."
)
def demo(folder: Path, model: Path | None, as_json: bool) -> None:
    """Teach a small model to add: model, backend, rollouts, training, and the gain with its interval.

    Takes a few minutes on two cores and needs the extra `backend-cpu`. At the end nothing runs any more, and
    the files are in one folder. Exit codes: 0 trained, 1 failed, 130 interrupted.
    """
    import json
    import signal
    import sys
    from dataclasses import asdict

    from insitu.demo.demo import Demo

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the backend then too
    screen = sys.stderr if as_json else sys.stdout
    model = model.resolve() if model else None
    figures = Demo(folder.resolve(), lambda line: click.echo(line, file=screen), screen, model).run()
    if as_json:
        click.echo(json.dumps(asdict(figures)))
