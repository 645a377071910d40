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
from insitu.harness.rollouts.rollout import Rollout
from insitu.harness.screen.run_reader import RunReader
from insitu.types import Ending


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


@pytest.mark.parametrize(
    ("section", "name", "said"),
    [
        ("init_args", "max_seq_len", "max_seq_len\n.*did you mean `max_seq_length`"),
        ("engine_args", "gpu_memory_utilisation", "did you mean `gpu_memory_utilization`"),
        ("engine_args", "max_seq_length", "belongs to init_args"),
        ("init_args", "load_in_4bit", r"unknown argument.* \(known: max_seq_length, micro_batch_tokens"),
    ],
)
def test_an_argument_that_no_backend_takes_is_rejected(section: str, name: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        BackendSettings.model_validate({section: {name: 1}})
    assert BackendSettings(init_args={"max_seq_length": 1}, engine_args={"enforce_eager": True})


def test_an_output_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"file/run cannot be written: FileExistsError") as caught:
        RunDirectory.open(tmp_path / "file" / "run", {})
    assert "finetuning.output_dir" in caught.value.hint


def test_a_part_of_a_rollouts_place_does_not_match_the_digits_at_its_end(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        for name in ("run_0.e3.0.0.aaaaaaaa", "run_0.e1.0.0.bbe3bbbb"):
            run.store("epoch-0000").append(Rollout(name, "e", 0, Ending.COMPLETED, 1.0))
    reader = RunReader.open(tmp_path / "run")
    assert reader.find("e3").rollout.rollout_id == "run_0.e3.0.0.aaaaaaaa"
    assert reader.find("bbe3").rollout.rollout_id == "run_0.e1.0.0.bbe3bbbb"
