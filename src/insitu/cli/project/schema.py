"""`insitu schema`: the JSON schema of a configuration file."""

from __future__ import annotations

import click


@click.command()
@click.option("--built-in", is_flag=True, help="Leave out the components of installed plugins.")
def schema(built_in: bool) -> None:
    """Print the JSON schema of the configuration, in its long and its short form.

    Editors check and complete a YAML file by it, with this first line:
    # yaml-language-server: $schema=schema.json
    """
    import json

    from insitu.config.schema.document import json_schema

    click.echo(json.dumps(json_schema(built_in=built_in), indent=2, ensure_ascii=False))
