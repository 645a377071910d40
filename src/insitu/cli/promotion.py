"""`insitu promote` and `insitu rollback`: the step that calls to a run's plain name get."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from insitu.cli.options.backend_url import ask, elsewhere, url_option

if TYPE_CHECKING:
    from insitu.wire.answers import PromotionInfo

_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the decision as the API describes it."
)


@click.command()
@click.argument("version", metavar="NAME@STEP")
@click.option("--newest", is_flag=True, help="Follow the newest step of NAME again.")
@url_option
@_json_option
def promote(version: str, newest: bool, url: str, as_json: bool) -> None:
    """Give calls to NAME a kept step, until another is promoted. Training and its rollouts go on.

    `insitu promote NAME --newest` gives them the newest step again, `insitu rollback NAME` what they got
    before.
    """
    from insitu.trained.promotion import promote as decide
    from insitu.types import parse_policy

    run, step = parse_policy(version)
    if newest == (step is not None):
        raise click.UsageError(
            f"give {run}@{step} or {run} --newest, not both"
            if newest
            else f"{run!r} names no step: write {run}@STEP, or {run} --newest"
        )
    _say(ask(url, lambda client: decide(client, run, step)), url, as_json=as_json)


@click.command()
@click.argument("name")
@url_option
@_json_option
def rollback(name: str, url: str, as_json: bool) -> None:
    """Give calls to NAME what they got before the last `insitu promote`. Repeat it to go further back."""
    from insitu.trained.promotion import roll_back

    _say(ask(url, lambda client: roll_back(client, name)), url, as_json=as_json)


def _say(promotion: PromotionInfo, url: str, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from insitu.harness.screen.safe_output import visible
    from insitu.trained.promotion import target_of

    if as_json:
        click.echo(json.dumps(asdict(promotion)))
        return
    what = target_of(promotion)
    if not promotion.reason:
        click.echo(f"calls to {promotion.run} get {what}")
        return
    click.echo(f"recorded, not served yet: calls to {promotion.run} will get {what}")
    click.echo(visible(f"  {promotion.reason}; see insitu runs show {promotion.run}{elsewhere(url)}"))
