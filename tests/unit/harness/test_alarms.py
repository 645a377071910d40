"""Alarms: begun and ended once each, with the words of the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from insitu.harness.files.metrics import AlarmLine, StepLine, append_step, write_steps
from insitu.harness.verdicts.alarms import with_alarms
from insitu.harness.verdicts.verdict import with_verdict
from tests.support.recorded_runs import SETTINGS, read_run


def watched(lines: list[StepLine], changed_at: int = 0) -> list[StepLine]:
    """The lines with verdicts and alarms; inputs changed before step `changed_at`."""
    done: list[StepLine] = []
    for line in lines:
        before = changed_at if len(done) >= changed_at else 0
        line["timestamp"] = "now"
        judged = with_verdict(done[before:], line, SETTINGS)
        done.append(with_alarms(done, before, judged, SETTINGS))
    return done


def told(lines: list[StepLine]) -> list[AlarmLine]:
    return [alarm for line in lines for alarm in line.get("alarms", ())]


def run(not_arriving: int) -> list[Any]:
    lines: list[Any] = read_run("small-0")
    for line in lines[:not_arriving]:
        line["training"]["probe/applied"] = 0.1
    return lines


def test_a_healthy_run_has_no_alarm() -> None:
    assert not any("alarms" in line for line in watched(run(0)))


def test_an_alarm_begins_and_ends_with_the_causes_of_the_verdicts() -> None:
    lines = watched(run(8))
    verdicts = [line["verdict"] for line in lines if "verdict" in line]
    held = [place for place, verdict in enumerate(verdicts) if verdict["causes"]]
    sentences = [verdict["sentence"].lower() for verdict in verdicts]
    began, ended = told(lines)
    assert (began["event"], began["cause"], began["epoch"]) == ("began", "not_arriving", held[0])
    assert (ended["event"], ended["cause"], ended["epoch"]) == ("ended", "not_arriving", held[-1] + 1)
    assert began["sentence"].startswith("only 10% of what training changes reaches the model")
    assert f"{began['sentence']}: {began['setting']}".lower() in sentences[held[0]]
    assert "?" not in ended["sentence"]
    assert ended["setting"].startswith("raise trainer_adapters.backend.training.learning_rate")


def test_an_alarm_of_other_inputs_ends_with_the_first_step_of_the_new_ones() -> None:
    lines = watched(run(8), changed_at=6)
    events = [(alarm["event"], alarm["epoch"]) for alarm in told(lines)]
    assert events[:3] == [("began", 1), ("ended", 6), ("began", 7)]
    assert "?" not in told(lines)[1]["sentence"]


def test_the_file_is_the_same_appended_and_rewritten(tmp_path: Path) -> None:
    lines = watched(run(8))
    for line in lines:
        append_step(tmp_path, line)
    appended = (tmp_path / "alarms.jsonl").read_bytes()
    assert [json.loads(line)["event"] for line in appended.splitlines()] == ["began", "ended"]
    (tmp_path / "alarms.jsonl").write_bytes(appended[:-9])
    write_steps(tmp_path, lines)
    assert (tmp_path / "alarms.jsonl").read_bytes() == appended
