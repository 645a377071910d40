"""`insitu report`: one file with everything that its pages ask for, and nothing that could run besides."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from insitu.cli.project.report import report
from insitu.errors import InsituError, NotFound
from insitu.view.answers.groups import group_view
from insitu.view.answers.one_rollout import rollout_view
from insitu.view.reports import report as module
from insitu.view.reports.report import make_report
from insitu.view.run import ViewedRun
from insitu.wire.message import encode

HOSTILE = "</script><script>alert(1)</script><!--"


def kept_in(text: str) -> dict[str, Any]:
    [data] = re.findall(r'<script type="application/json" id="kept">(.*?)</script>', text, re.DOTALL)
    assert "<" not in data, "nothing in the data can end its element"
    return orjson.loads(data)


def test_the_answers_are_those_of_the_server(viewed: ViewedRun) -> None:
    made = make_report(viewed, 5)
    kept = kept_in(made.text)
    answers = kept["answers"]
    prefix = f"view/v1/runs/{viewed.key}"
    listed = answers[f"{prefix}/groups?sort=spread&limit=100"]["groups"]
    assert (len(listed), made.num_groups, made.all_groups) == (5, 5, 36)
    assert f"5 of the run's {made.all_groups} groups" in kept["notice"]
    for row in listed:
        group = answers[f"{prefix}/groups/{row['store']}/{row['index']}"]
        assert group == orjson.loads(encode(group_view(viewed, row["store"], row["index"], 16)))
        for sibling in group["tree"]["siblings"]:
            rollout = answers[f"{prefix}/rollouts/{sibling['rollout_id']}"]
            assert rollout == orjson.loads(encode(rollout_view(viewed, sibling["rollout_id"])))
    [shown] = [each for address, each in answers.items() if "/compare?" in address]
    compared = [
        example[side] for example in shown["examples"] for side in ("rollout_before", "rollout_after")
    ]
    assert len(compared) == 2 * shown["total"]
    for rollout_id in compared:
        assert answers[f"{prefix}/rollouts/{rollout_id}"]["row"]["rollout_id"] == rollout_id
    rows = answers[f"{prefix}/rollouts?limit=100"]["rollouts"]
    assert [each["rollout_id"] for each in rows] == [
        sibling["rollout_id"]
        for row in listed
        for sibling in answers[f"{prefix}/groups/{row['store']}/{row['index']}"]["tree"]["siblings"]
    ] + compared
    stores = [each["name"] for each in answers[prefix]["stores"] if each["kind"] == "validation"]
    assert f"{prefix}/compare?before={stores[0]}&after={stores[-1]}&limit=100" in answers
    assert {f"{prefix}/config", f"{prefix}/alarms", "view/v1/runs"} <= answers.keys()
    assert str(viewed.path) not in made.text, "its reader need not know where the run lies"


def test_only_the_pages_own_script_and_style_may_run(viewed: ViewedRun) -> None:
    text = make_report(viewed, 1).text
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)"', text)
    [script] = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for kind, inline in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{kind}-src &#x27;sha256-{digest}&#x27;" in policy
    assert policy.startswith("default-src &#x27;none&#x27;")
    assert "unsafe" not in policy
    assert text.count("<script") == 2


def test_hostile_texts_stay_data(viewed: ViewedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    named = module.summary(viewed)
    monkeypatch.setattr(module, "summary", lambda _: module.replace(named, name=HOSTILE))
    text = make_report(viewed, 1).text
    assert kept_in(text)["answers"]["view/v1/runs"]["runs"][0]["name"] == HOSTILE
    assert text.count("<script") == 2


def test_a_large_run_ends_at_the_limit(viewed: ViewedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_report(viewed, 20)
    monkeypatch.setattr(module, "MOST_BYTES", len(whole.text) // 2)
    cut = make_report(viewed, 20)
    assert 0 < cut.num_groups < whole.num_groups == 20
    assert f"{cut.num_groups} of the run's" in kept_in(cut.text)["notice"]


def test_pages_that_could_not_be_inlined_are_an_error(viewed: ViewedRun, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="has no pages"):
        make_report(viewed, 1, tmp_path)
    (tmp_path / "app.css").write_text("")
    (tmp_path / "app.js").write_text('"</SCRIPT>"')
    with pytest.raises(InsituError, match=r"app\.js cannot be written into a page"):
        make_report(viewed, 1, tmp_path)


def test_the_command_writes_the_file(run_copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    done = CliRunner().invoke(report, [str(run_copy), "--out", str(out), "--groups", "2"])
    assert done.exit_code == 0, done.output
    assert "2 of 36 groups with all their tokens" in done.output
    assert out.read_text().startswith("<!doctype html>")
