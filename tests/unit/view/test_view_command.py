"""`insitu view` as a user runs it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from insitu.view.catalogue import Catalogue
from insitu.view.http.server import serve


@pytest.mark.parametrize("named", ["directory", "configuration"])
def test_the_command_serves_a_run_until_it_is_interrupted(run_copy, named):
    smallest = {"model": "tiny", "agent": "agent:run", "data": "data.json", "reward": "reward:score"}
    config = smallest | {"finetuning": {"output_dir": str(run_copy)}}
    (run_copy.parent / "config.yml").write_text(json.dumps(config))
    what = str(run_copy) if named == "directory" else "config.yml"
    command = [sys.executable, "-m", "insitu.cli", "view", what, "--no-browser"]
    with subprocess.Popen(
        command, cwd=run_copy.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
            assert found is not None
            with urllib.request.urlopen(f"{found[0]}view/v1/runs", timeout=30) as answer:
                assert json.load(answer)["runs"][0]["num_steps"] == 6
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode in (0, 130), errors
    assert "Traceback" not in errors


def test_a_directory_without_runs(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "insitu.cli", "view", str(tmp_path), "--no-browser"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "is neither a run of `insitu finetune` nor a directory that holds some" in result.stderr
    assert "next: name the finetuning.output_dir of a run" in result.stderr


def test_a_port_that_is_taken(run_copy):
    import socket

    from insitu.errors import InsituError

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InsituError, match="port"):
            serve(run_copy, taken.getsockname()[1], tokenizer=None, ready=lambda _: None)


def test_views_need_no_accelerator_libraries():
    code = "import sys, insitu.view.http.server; print([m for m in ('torch', 'ray', 'transformers', 'insitu.backend') if m in sys.modules])"  # noqa: E501
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_run_directory_and_a_directory_above_it(run_copy):
    for root in (run_copy, run_copy.parent, run_copy.parent.parent):
        catalogue = Catalogue(root)
        found, problems = catalogue.runs()
        assert [run.path for run in found] == [run_copy]
        assert problems == []
        catalogue.close()
