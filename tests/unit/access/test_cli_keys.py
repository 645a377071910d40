"""`insitu keys`: create prints the key alone and once; list and revoke never show it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from insitu.access.audit_log import AUDIT_FILE
from insitu.access.key_file import KEYS_FILE, read_keys
from insitu.access.key_limits import KeyLimits
from insitu.access.keyring import Holder, Keyring
from insitu.access.projects import EVERYTHING, Project
from insitu.access.routes import Access
from insitu.access.scopes import Scope
from insitu.cli import cli
from insitu.errors import Forbidden, InvalidRequest, NotFound
from insitu.system.keys import hash_key


def run(*arguments: str, state_dir: Path) -> Result:
    return CliRunner().invoke(cli, ["keys", *arguments], env={"INSITU_STATE_DIR": str(state_dir)})


def test_a_key_from_creation_to_revocation(tmp_path: Path) -> None:
    created = run(
        "create", "ci", "--scope", "submit", "--scope", "infer", "--expires", "30d", state_dir=tmp_path
    )
    assert created.exit_code == 0, created.output
    (key,) = created.stdout.splitlines()
    assert str(tmp_path) in created.stderr
    (stored,) = read_keys(tmp_path / KEYS_FILE)
    assert (stored.name, stored.scopes) == ("ci", ["infer", "submit"])
    assert stored.expires_at == pytest.approx(time.time() + 30 * 86_400, abs=60)
    holder = Keyring(hash_key("own"), tmp_path / KEYS_FILE).holder([key])
    assert holder is not None
    assert holder.scopes == {"infer", "submit"}

    listed = run("list", state_dir=tmp_path)
    header, row = listed.stdout.splitlines()
    assert header.split() == ["NAME", "SCOPES", "STATE", "CREATED", "EXPIRES", "LIMITS"]
    assert row.split()[:3] == ["ci", "infer,submit", "active"]
    revoked = run("revoke", "ci", state_dir=tmp_path)
    assert revoked.exit_code == 0
    assert revoked.stdout.startswith("ci was revoked at ")
    assert "revoked" in run("list", state_dir=tmp_path).stdout
    for shown in (created.stderr, listed.output, revoked.output):
        assert key not in shown
        assert stored.sha256 not in shown


def test_limits_are_stored_listed_and_audited(tmp_path: Path) -> None:
    given = ("--max-requests-per-minute", "60", "--max-concurrent", "4")
    given += ("--max-tokens-per-day", "1000000", "--max-bytes-per-day", "5000")
    created = run("create", "a", "--scope", "infer", *given, state_dir=tmp_path)
    assert created.exit_code == 0, created.output
    limits = "60 requests/min, 4 at once, 1,000,000 tokens/day, 5,000 bytes/day"
    assert limits in created.stderr
    assert run("create", "b", "--scope", "infer", state_dir=tmp_path).exit_code == 0
    first, second = read_keys(tmp_path / KEYS_FILE)
    assert first.limits == KeyLimits(60, 4, 1_000_000, 5000)
    assert second.limits == KeyLimits()
    _, *rows = run("list", state_dir=tmp_path).stdout.splitlines()
    assert rows[0].endswith(limits)
    assert rows[1].endswith("none")
    assert f"keys create a infer ({limits})" in (tmp_path / AUDIT_FILE).read_text()


def test_a_file_of_an_earlier_release_has_no_limits(tmp_path: Path) -> None:
    run("create", "a", "--scope", "infer", state_dir=tmp_path)
    content = json.loads((tmp_path / KEYS_FILE).read_text())
    del content["keys"][0]["limits"]
    (tmp_path / KEYS_FILE).write_text(json.dumps(content))
    assert read_keys(tmp_path / KEYS_FILE)[0].limits == KeyLimits()


@pytest.mark.parametrize("option", ["requests-per-minute", "concurrent", "tokens-per-day", "bytes-per-day"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", str(2**53)])
def test_a_limit_out_of_range_is_rejected(tmp_path: Path, option: str, value: str) -> None:
    refused = run("create", "a", "--scope", "infer", f"--max-{option}", value, state_dir=tmp_path)
    assert refused.exit_code == 2
    assert not (tmp_path / KEYS_FILE).exists()


def test_a_key_may_have_a_project(tmp_path: Path) -> None:
    run("create", "old", "--scope", "infer", state_dir=tmp_path)
    created = run("create", "a", "--scope", "infer", "--project", "team-a", state_dir=tmp_path)
    assert created.exit_code == 0, created.output
    assert "scopes infer of project team-a" in created.stderr
    keyring = Keyring(hash_key("own"), tmp_path / KEYS_FILE)
    holder, owner = keyring.holder([created.stdout.strip()]), keyring.holder(["own"])
    assert holder is not None
    assert owner is not None
    assert (holder.project, owner.project) == (Project("team-a"), EVERYTHING)
    header, *rows = (line.split() for line in run("list", state_dir=tmp_path).stdout.splitlines())
    assert header[-2] == "PROJECT"
    assert [row[-2] for row in rows] == ["all", "team-a"]
    run("revoke", "a", state_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / AUDIT_FILE).read_text().splitlines()]
    assert [line.get("project") for line in lines] == [None, "team-a", "team-a"]


@pytest.mark.parametrize("project", ["", "Team", "a~b", "a/b", "x" * 65])
def test_a_project_has_the_letters_of_a_name(tmp_path: Path, project: str) -> None:
    refused = run("create", "a", "--scope", "infer", "--project", project, state_dir=tmp_path)
    assert isinstance(refused.exception, InvalidRequest)
    assert not (tmp_path / KEYS_FILE).exists()


def test_a_route_of_the_whole_backend_needs_a_key_without_project() -> None:
    Holder("a", frozenset({Scope.ADMIN})).require(Access.WHOLE, "POST /v1/new")
    for holder in (
        Holder("a", frozenset({Scope.ADMIN}), Project("team-a")),
        Holder("a", frozenset({Scope.SUBMIT})),
    ):
        with pytest.raises(Forbidden, match="POST /v1/new"):
            holder.require(Access.WHOLE, "POST /v1/new")


def test_the_option_names_the_directory_too(tmp_path: Path) -> None:
    created = run(
        "create", "a", "--scope", "admin", "--state-dir", str(tmp_path / "x"), state_dir=tmp_path / "y"
    )
    assert created.exit_code == 0
    assert (tmp_path / "x" / KEYS_FILE).exists()
    assert not (tmp_path / "y").exists()
    assert "never" in run("list", state_dir=tmp_path / "x").stdout


def test_without_keys_the_list_says_so(tmp_path: Path) -> None:
    listed = run("list", state_dir=tmp_path / "none")
    assert (listed.exit_code, listed.stdout) == (0, "")
    assert "INSITU_API_KEY" in listed.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("expires", ["30", "0d", "-1d", "1y", "d", "30 d", "99999d", "1.5d", ""])
def test_a_lifetime_that_is_none_is_rejected(tmp_path: Path, expires: str) -> None:
    refused = run("create", "a", "--scope", "infer", "--expires", expires, state_dir=tmp_path)
    assert refused.exit_code == 2
    assert "30d" in refused.output
    assert not (tmp_path / KEYS_FILE).exists()


@pytest.mark.parametrize("scopes", [[], ["--scope", "root"], ["--scope", ""]])
def test_a_key_needs_known_scopes(tmp_path: Path, scopes: list[str]) -> None:
    assert run("create", "a", *scopes, state_dir=tmp_path).exit_code == 2
    assert not (tmp_path / KEYS_FILE).exists()


def test_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    assert isinstance(run("revoke", "a", state_dir=tmp_path).exception, NotFound)


def test_the_commands_import_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from insitu.cli import cli\n"
        f"cli.main(['keys', 'create', 'a', '--scope', 'infer', '--state-dir', {str(tmp_path)!r}], "
        "standalone_mode=False)\n"
        "heavy = {'torch', 'fastapi', 'sqlalchemy', 'ray', 'vllm', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
