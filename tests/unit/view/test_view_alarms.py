"""The alarms of the pages are those of alarms.jsonl."""

from __future__ import annotations

from pathlib import Path

import orjson

from insitu.view.answers.alarms import alarms_of
from insitu.view.run import ViewedRun


def test_the_page_and_the_file_tell_the_same_causes_in_the_same_words(
    viewed: ViewedRun, finished_run: Path
) -> None:
    lines = [orjson.loads(line) for line in (finished_run / "alarms.jsonl").read_bytes().splitlines()]
    steps = [orjson.loads(line) for line in (finished_run / "steps.jsonl").read_bytes().splitlines()]
    places = {(step["epoch"], step["step_of_epoch"]): step["step"] for step in steps}
    began = {
        line["cause"]: places[line["epoch"], line["step_of_epoch"]]
        for line in lines
        if line["event"] == "began"
    }
    ended = {line["cause"] for line in lines if line["event"] == "ended"}
    found = alarms_of(viewed).alarms
    assert found
    assert {alarm.rule: alarm.first_step for alarm in found} == began
    assert {alarm.rule for alarm in found if not alarm.active} == ended
    few = next(line for line in lines if line["cause"] == "too_few_updates")
    assert (few["sentence"], few["setting"]) in [(alarm.sentence, alarm.setting) for alarm in found]
