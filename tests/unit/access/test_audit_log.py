"""Every change at the API and every change of a key has its line in the audit log, before it is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.access.audit_log import AUDIT_FILE, AuditLog
from insitu.access.key_changes import create_key, revoke_key
from insitu.access.key_file import KEYS_FILE, read_keys
from insitu.access.scopes import Scope
from insitu.errors import Unavailable


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / AUDIT_FILE).read_text().splitlines()]


def test_a_line_says_who_what_whence_and_when(tmp_path: Path) -> None:
    AuditLog(tmp_path / AUDIT_FILE).note("nightly", 'POST /v1/runs/"\n', "10.0.0.7")
    (line,) = lines(tmp_path)
    assert line.pop("at").endswith("Z")
    assert line == {"key": "nightly", "change": 'POST /v1/runs/"\n', "from": "10.0.0.7"}
    assert (tmp_path / AUDIT_FILE).stat().st_mode & 0o777 == 0o600


def test_lines_of_many_processes_stay_whole(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from insitu.access.audit_log import AuditLog\n"
        "for n in range(200): AuditLog(Path(sys.argv[1])).note(sys.argv[2], 'x' * 300, '')"
    )
    command = [sys.executable, "-c", program, str(tmp_path / AUDIT_FILE)]
    writers = [subprocess.Popen([*command, f"writer{n}"]) for n in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    keys = [line["key"] for line in lines(tmp_path)]
    assert {key: keys.count(key) for key in keys} == {f"writer{n}": 200 for n in range(3)}


def test_a_file_that_was_moved_away_begins_anew(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / AUDIT_FILE)
    log.note("a", "first", "")
    os.rename(tmp_path / AUDIT_FILE, tmp_path / "old")
    log.note("a", "second", "")
    assert [line["change"] for line in lines(tmp_path)] == ["second"]


def test_keys_that_are_made_and_revoked_are_noted_without_the_key(tmp_path: Path) -> None:
    secret, _ = create_key(tmp_path, "agent", [Scope.INFER, Scope.SUBMIT])
    for _ in range(2):
        revoke_key(tmp_path, "agent")  # the second time nothing changes
    assert [line["change"] for line in lines(tmp_path)] == [
        "keys create agent infer,submit",
        "keys revoke agent",
    ]
    assert lines(tmp_path)[0]["key"] == f"user {os.geteuid()}"
    assert secret not in (tmp_path / AUDIT_FILE).read_text()


def test_no_key_is_made_that_cannot_be_noted(tmp_path: Path) -> None:
    (tmp_path / AUDIT_FILE).mkdir()
    with pytest.raises(
        Unavailable, match=r"not made, because it cannot be noted in audit\.jsonl: Is a directory"
    ):
        create_key(tmp_path, "agent", [Scope.INFER])
    assert read_keys(tmp_path / KEYS_FILE) == []
