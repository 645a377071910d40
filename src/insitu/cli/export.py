"""`insitu export`: the weights of a run, to serve or to start from elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from insitu.cli.options.backend_url import ask, url_option


@click.command()
@click.argument("version", metavar="NAME[@STEP]")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--merged", is_flag=True, help="Write base model plus adapter as one model, instead of the adapter."
)
@click.option(
    "--base-model",
    metavar="MODEL",
    help="Directory or hub id of the base model on this machine. Default: as the backend names it.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Precision of merged weights. Default: the base model's.",
)
@click.option(
    "--from",
    "output",
    metavar="OUTPUT_DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Output directory of the run's `insitu finetune`: data, reward and figures for the model card.",
)
@click.option("--license", "licence", metavar="NAME", help="Licence of the base model, for the model card.")
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(
    version: str,
    directory: Path,
    merged: bool,
    base_model: str | None,
    dtype: str | None,
    output: Path | None,
    licence: str | None,
    url: str,
    as_json: bool,
) -> None:
    """Write the weights of a run's step (by default its last) into a new directory, with a model card.

    The adapter comes over the API, from any machine; its digests are checked. Merged weights are made here,
    which needs the base model and `insitu[backend-cpu]` or `insitu[backend]`.
    """
    import json

    from insitu.trained.export import ExportOptions
    from insitu.trained.export import export as write

    if dtype is not None and not merged:
        raise click.UsageError("--dtype is for merged weights: give --merged too")
    options = ExportOptions(merged=merged, base_model=base_model, dtype=dtype, licence=licence, output=output)
    written = ask(url, lambda client: write(client, version, directory, options))
    if as_json:
        click.echo(json.dumps(written.to_dict()))
        return
    size = sum(written.files.values()) / 2**20
    click.echo(f"{written.run}@{written.step}: {written.kind}, {size:.1f} MiB in {written.directory}")
    click.echo("Serve it with vLLM:")
    click.echo(f"  {written.shell_command}")
