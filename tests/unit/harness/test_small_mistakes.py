"""Small mistakes of a first hour: each is answered with its cause and the next thing to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from insitu.cli import cli
from insitu.errors import InvalidRequest
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.interfaces.settings import BackendSettings


def test_a_mistyped_command_names_the_one_that_was_meant() -> None:
    result = CliRunner().invoke(cli, ["finetun"])
    assert result.exit_code == 2
    assert "No such command 'finetun'; did you mean `finetune`?" in result.output
    assert "did you mean" not in CliRunner().invoke(cli, ["xyzzy"]).output


@pytest.mark.parametrize(
    ("given", "meant"),
    [("http://localhost", "localhost"), ("https://gpu.example:7623/", "gpu.example"), ("gpu:7623", "gpu")],
)
def test_an_address_with_more_than_a_host_is_rejected_with_the_host(given: str, meant: str) -> None:
    with pytest.raises(ValidationError, match=f"write only the host: {meant}"):
        BackendSettings(ip=given, port=7623)


@pytest.mark.parametrize(("given", "url"), [("::1", "http://[::1]:7"), ("localhost", "http://localhost:7")])
def test_hosts_and_ip_addresses_stay_as_they_are(given: str, url: str) -> None:
    assert BackendSettings(ip=given, port=7).url == url


def test_an_output_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"file/run cannot be written: FileExistsError") as caught:
        RunDirectory.open(tmp_path / "file" / "run", {})
    assert "finetuning.output_dir" in caught.value.hint
