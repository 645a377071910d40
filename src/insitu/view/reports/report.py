"""A report: one HTML file with the pages, and the answers that they would ask a server for.

    run directory ──► answers, by the address that the pages ask for ──► JSON in the file
    pages/app.js, pages/app.css ─────────────────────────────────────► inline, named by their hashes

The policy in the file lets only these two run, so texts of a model stay texts. It holds some groups of the
run, those whose rewards differ most first, until it would be too large.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlencode

import orjson

from insitu.errors import InsituError, NotFound
from insitu.view.answers.alarms import alarms_of
from insitu.view.answers.comparison import compare_view
from insitu.view.answers.groups import group_page, group_view
from insitu.view.answers.one_rollout import rollout_view
from insitu.view.answers.overview import config_view, run_view, summary
from insitu.view.answers.rollouts import rollouts_view
from insitu.view.reading.query import Filters
from insitu.view.run import ViewedRun
from insitu.web_pages import PAGES
from insitu.wire.message import Message, encode
from insitu.wire.views.compare import ComparedExample
from insitu.wire.views.groups import GroupPage, GroupRow
from insitu.wire.views.rollouts import RolloutPage, RolloutRow
from insitu.wire.views.runs import RunListView, RunView

MOST_BYTES = 20 * 2**20
_SIBLINGS = 16
_LIMIT = 100
"""The length of a page of a list, as the pages ask for it."""


@dataclass(frozen=True, slots=True)
class Report:
    """The file, and how much of the run is in it."""

    text: str
    num_groups: int
    all_groups: int


class _Answers:
    """Answers by address, as they are written into the file."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._kept: dict[str, bytes] = {}
        self.num_bytes = 0

    def add(self, answer: Message, *parts: str, **query: str | int) -> None:
        self.put("/".join(["view/v1/runs", *(quote(part, safe="!'()*") for part in parts)]), answer, query)

    def add_of_run(self, answer: Message, *parts: str, **query: str | int) -> None:
        self.add(answer, self._run, *parts, **query)

    def put(self, path: str, answer: Message, query: dict[str, str | int]) -> None:
        address = f"{path}?{urlencode(query)}" if query else path
        self._kept[address] = encode(answer)
        self.num_bytes += len(self._kept[address])

    def joined(self) -> bytes:
        return b"{" + b",".join(orjson.dumps(key) + b":" + value for key, value in self._kept.items()) + b"}"


def make_report(run: ViewedRun, num_groups: int, pages: Path = PAGES) -> Report:
    """Return the report of a run that is read to its end."""
    view = run_view(run)
    # The reader of a report need not know where its run lies.
    view = replace(view, run=replace(view.run, path=run.path.name))
    answers = _Answers(run.key)
    answers.add(RunListView([replace(summary(run), path=run.path.name)], run.path.name, []))
    answers.add_of_run(view)
    answers.add_of_run(config_view(run), "config")
    answers.add_of_run(alarms_of(run), "alarms")
    compared = _add_comparison(run, view, answers)
    listed = group_page(run, Filters(), "spread", None, min(num_groups, _LIMIT))
    groups: list[GroupRow] = []
    rows: list[RolloutRow] = []
    for group in listed.groups:
        if answers.num_bytes > MOST_BYTES:
            break
        found = group_view(run, group.store, group.index, _SIBLINGS)
        answers.add_of_run(found, "groups", group.store, str(group.index))
        groups.append(group)
        rows += found.tree.siblings
        for sibling in found.tree.siblings:
            answers.add_of_run(rollout_view(run, sibling.rollout_id), "rollouts", sibling.rollout_id)
    held = {row.rollout_id for row in rows}
    rows += [row for row in compared if row.rollout_id not in held]
    answers.add_of_run(GroupPage(groups, None, len(groups)), "groups", sort="spread", limit=_LIMIT)
    counts = rollouts_view(run, Filters(), "oldest", None, 1)
    page = RolloutPage(rows, None, len(rows), counts.endings, counts.reasons)
    answers.add_of_run(page, "rollouts", limit=_LIMIT)
    notice = (
        f"This report is one file: it holds {len(groups)} of the run's {listed.total} groups, with all their "
        "tokens. The rest is in the run's directory, which `insitu view` shows."
    )
    return Report(_html(answers, notice, view, pages), len(groups), listed.total)


def _add_comparison(run: ViewedRun, view: RunView, answers: _Answers) -> list[RolloutRow]:
    """Add the first and the last validation, or else steps, with the rollouts that are shown side by side.

    Return the rollouts. Examples whose rollouts would leave no room for groups are left out.
    """
    for kind in ("validation", "training"):
        stores = [store.name for store in view.stores if store.kind == kind]
        if len(stores) > 1:
            found = compare_view(run, stores[0], run, stores[-1], None, _LIMIT)
            shown: list[ComparedExample] = []
            rows: list[RolloutRow] = []
            for example in found.examples:
                if answers.num_bytes > MOST_BYTES // 2:
                    break
                for rollout_id in filter(None, (example.rollout_before, example.rollout_after)):
                    rollout = rollout_view(run, rollout_id)
                    answers.add_of_run(rollout, "rollouts", rollout_id)
                    rows.append(rollout.row)
                shown.append(example)
            kept = replace(found, next=None, examples=shown)
            answers.add_of_run(kept, "compare", before=stores[0], after=stores[-1], limit=_LIMIT)
            return rows
    return []


def _html(answers: _Answers, notice: str, view: RunView, pages: Path) -> str:
    script, style = (_built(pages / name) for name in ("app.js", "app.css"))
    kept = (
        orjson.dumps({"notice": notice, "run": view.run.key})[:-1] + b',"answers":' + answers.joined() + b"}"
    )
    # Within a script element only `<` could end it.
    data = kept.decode().replace("<", "\\u003c")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_source(script)}'",
            f"style-src '{_source(style)}'",
            "img-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    title = html.escape(f"{view.run.name or view.run.run_id} · insitu")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8" />',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}" />',
            '<meta name="viewport" content="width=device-width, initial-scale=1" />',
            '<meta name="color-scheme" content="light dark" /><meta name="referrer" content="no-referrer" />',
            f"<title>{title}</title>",
            f"<style>{style}</style></head>",
            f'<body><div id="app"></div><script type="application/json" id="kept">{data}</script>',
            f'<script type="module">{script}</script></body></html>',
            "",
        ]
    )


def _built(path: Path) -> str:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise NotFound(f"{path} is missing: this installation has no pages") from None
    if any(end in text.lower() for end in ("</script", "</style", "<!--")):
        raise InsituError(f"{path} cannot be written into a page as it is")
    return text


def _source(text: str) -> str:
    """Return the text by which the policy names an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def read_to_the_end(run: ViewedRun) -> Iterator[int]:
    """Index the whole run; yield the number of rollouts so far."""
    while not run.index.refresh():
        yield run.index.progress().num_rollouts
    yield run.index.progress().num_rollouts
