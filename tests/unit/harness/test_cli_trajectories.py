"""`insitu trajectories`: what a rollout looks like in the terminal, and what it cannot do to it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from insitu.cli.trajectories import trajectories
from insitu.errors import InsituError
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.rollouts.capture import Capture
from insitu.harness.screen.rollout_page import page
from insitu.harness.screen.shown_rollout import ShownRollout
from insitu.testing.standins import make_run
from tests.support.rollouts import rollout_of

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07\u202egnp.exe\r\nrollout run.e0.9.9 forged\x9b31m\ud800\u2028call 9/9 planner"
)
LINES = "one\ntwo"


def call(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"call-{number}",
        "rollout_id": "r",
        "model": "standin-run",
        "run": "standin-run",
        "function": "planner",
        "policy_step": 3,
        "policy_version": "standin-run@3",
        "prompt_ids": [1, 2],
        "output_ids": [3, 4, 5],
        "logprobs": [-0.01, -0.7, -6.0],
        "num_prompt_tokens": 2,
        "num_output_tokens": 3,
        "finish_reason": "stop",
        "constrained": False,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
        "tools": None,
        "answer": {"role": "assistant", "content": "Because."},
        "timings": {"total": 0.5},
        "started_at": 1.0,
        "parent_id": None,
        "shared_tokens": 0,
        "shared_messages": 0,
        "shared_tools": False,
        **fields,
    }


def record(index: int, generation: int, reward: float | None = 0.5, **fields: Any) -> dict[str, Any]:
    asked = {"role": "assistant", "content": None, "tool_calls": [tool_call("look", '{"q": "x"}')]}
    first = call(1, answer=asked)
    told = [*first["messages"], asked, {"role": "tool", "tool_call_id": "t1", "content": "found it"}]
    calls = [first, call(2, messages=told), call(3, function="worker", messages=[])]
    capture = Capture(seen=3, trained=2, context_only={"other_function": 1})
    return {
        "rollout_id": f"run.e0.{index}.{generation}.abcd{index}{generation}",
        "example_id": f"row-{index}",
        "index": index,
        "generation": generation,
        "ending": "completed" if reward is not None else "timeout",
        "reward": reward,
        "reason": "" if reward is not None else "no answer within 9 s",
        "seconds": 2.5,
        "started_at": 1_700_000_000.0,
        "call_ids": ["call-1", "call-2"],
        "left_out": {"call-3": "other_function"},
        "step_rewards": {"call-2": 0.25},
        "metadata": {
            "num_calls": 3,
            "num_output_tokens": 9,
            "policy_steps": [3],
            "components": {"right": 1.0, "short": 0.0},
            "capture": capture.to_dict(),
        },
        "input": "Why?",
        "expected": "Because.",
        "output": "Because.",
        "calls": calls,
        **fields,
    }


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "t1", "type": "function", "function": {"name": name, "arguments": arguments}}


def hostile() -> dict[str, Any]:
    """A rollout in which everything that others wrote is meant to deceive the reader."""
    answer = {"content": HOSTILE, "tool_calls": [tool_call(HOSTILE, HOSTILE)]}
    said = [
        {"role": HOSTILE, "content": HOSTILE},
        {"role": "tool", "tool_call_id": HOSTILE, "content": HOSTILE},
    ]
    bad = call(1, function=HOSTILE, model=HOSTILE, messages=said, answer=answer, finish_reason=HOSTILE)
    words = dict.fromkeys(("input", "expected", "output", "reason", "example_id"), HOSTILE)
    return record(7, 0, calls=[bad], call_ids=["call-1"], step_rewards=None, left_out={}, **words)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two epochs and a validation; the gateway of its configuration is away."""
    made = make_run(tmp_path)
    with made.directory as directory:
        first = directory.store("epoch-0000")
        for index in range(2):
            for generation in range(2):
                failed = index == generation == 1
                reward = None if failed else 0.25 * (index + generation)
                first.append(rollout_of(record(index, generation, reward)))
        directory.write_dropped("epoch-0000", {"run.e0.1.0.abcd10": "too_small"})
        directory.store("epoch-0001").append(rollout_of(hostile()))
        directory.store("validation-0000").append(
            rollout_of(record(5, 0, 1.0, rollout_id="run.validation-0000.5.0.ffff"))
        )
    return tmp_path / "run"


def insitu(*arguments: str) -> str:
    result = CliRunner().invoke(trajectories, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def assert_harmless(text: str) -> None:
    """No control character but the line feed, and no line at the margin that others wrote."""
    bad = [character for character in text if character != "\n" and not character.isprintable()]
    assert not bad, f"{bad!r} in {text!r}"
    for line in text.splitlines():
        assert not re.match(r"\s*(rollout run\.e0\.9\.9|call 9/9)", line), line


def test_a_row_for_every_rollout(run: Path) -> None:
    lines = insitu("list", str(run), "--epoch", "0").splitlines()
    assert lines[0].split() == [
        "file",
        "example",
        "gen",
        "ending",
        "reward",
        "calls",
        "tokens",
        "steps",
        "rollout",
    ]
    assert lines[1].split() == [
        "epoch-0000",
        "row-0",
        "0",
        "completed",
        "0",
        "3",
        "9",
        "3",
        "run.e0.0.0.abcd00",
    ]
    assert lines[4].split() == ["epoch-0000", "row-1", "1", "timeout", "3", "9", "3", "run.e0.1.1.abcd11"]
    assert len(lines) == 5


def test_rows_are_filtered_sorted_and_limited(run: Path) -> None:
    def ids(*options: str) -> list[str]:
        return [
            line.split()[-1] for line in insitu("list", str(run), "--epoch", "0", *options).splitlines()[1:]
        ]

    assert ids("--ending", "timeout") == ["run.e0.1.1.abcd11"]
    assert ids("--best", "--limit", "0")[0] == "run.e0.0.1.abcd01"
    assert ids("--worst")[0] == "run.e0.0.0.abcd00"
    assert len(ids("--best")) == 3, "those without a reward are neither"
    cut = insitu("list", str(run), "--limit", "1")
    assert "4 more: --limit 0 shows all" in cut
    assert "validation-0000" in insitu("list", str(run), "--validation")


def test_the_list_as_json_is_complete_and_strict(run: Path) -> None:
    found = json.loads(insitu("list", str(run), "--json"), parse_constant=pytest.fail)
    assert (found["total"], len(found["rollouts"])) == (5, 5)
    first = found["rollouts"][0]
    assert (first["store"], first["reward"], first["num_trained_calls"]) == ("epoch-0000", 0.0, 2)
    assert first["step_rewards"] == [0.0, 0.25]
    assert first["capture"]["context_only"] == {"other_function": 1}


def test_a_rollout_is_shown_whole(run: Path) -> None:
    text = insitu("show", str(run), "e0.0.1")
    for part in (
        "rollout run.e0.0.1.abcd01",
        "epoch-0000, example row-0, generation 1",
        "completed after 2.50 s",
        "0.25 (right 1, short 0), and 0.25 for single calls",
        "rewards of the example's rollouts: 0, [0.25]",
        "training  selected\n",
        "standin-run: step 3 (standin-run@3)",
        "3 seen = 2 to train on + 1 context-only (other-function 1)",
        "call 1/3 planner  standin-run step 3  to train on  call reward +0",
        "call 2/3 planner  standin-run step 3  to train on  call reward +0.25",
        "call 3/3 worker  standin-run step 3  not trained: other function",
        "2 prompt + 3 sampled tokens, stop, 0.50 s",
        'tool call look({"q": "x"})  t1',
        "tool result t1\n  │ found it",
        "assistant\n  │ Because.",
        "token ids\n  │ 3 4 5",
        "token texts from nowhere: ",
    ):
        assert part in text, f"{part!r} is not in:\n{text}"
    assert text.count("Be brief.") == 1, "a message that a later call repeats is shown once"
    assert "\x1b" not in text, "no colours but on a terminal"


def test_a_failed_rollout_says_why(run: Path) -> None:
    text = insitu("show", str(run), "abcd11")
    assert "timeout after 2.50 s" in text
    assert "no answer within 9 s" in text
    assert "reward    none" in text
    assert "3 seen = 0 to train on + 1 context-only (other-function 1) + 2 dropped (2 failed)" in text


def test_the_reward_of_an_ending_is_shown_as_such(run: Path, tmp_path: Path) -> None:
    with make_run(tmp_path).directory as directory:
        failed = record(8, 0, -0.5, ending="timeout", reason="no answer within 9 s", step_rewards=None)
        directory.store("epoch-0002").append(rollout_of(failed))
    text = insitu("show", str(run), "abcd80")
    assert "no answer within 9 s" in text
    assert "reward    -0.5 (that of its ending)" in text
    assert "3 seen = 2 to train on + 1 context-only" in text


def test_whether_a_rollout_is_trained(run: Path) -> None:
    assert "training  dropped: too-small\n" in insitu("show", str(run), "abcd10")
    assert "training  not decided" in insitu("show", str(run), "validation-0000.5.0")


def test_tokens_one_by_one(run: Path) -> None:
    lines = insitu("show", str(run), "e0.0.0", "--tokens").splitlines()
    assert '         2        5   -6.0000   0.2%  "?"' in lines
    assert '         0        3   -0.0100  99.0%  "?"' in lines


def test_nothing_that_others_wrote_reaches_the_terminal_as_it_is(run: Path) -> None:
    for text in (
        insitu("list", str(run)),
        insitu("show", str(run), "abcd70"),
        insitu("show", str(run), "abcd70", "--tokens"),
    ):
        assert_harmless(text)
    whole = insitu("show", str(run), "abcd70", "--json")
    assert_harmless(whole)
    assert json.loads(whole)["output"] == HOSTILE


def shown(**fields: Any) -> ShownRollout:
    made = record(0, 0)
    pieces = {"output_pieces": ["Be", "cau", "se.\x1b[31m"], "prompt_text": "<system>Be brief."}
    made["calls"] = [{**each, **pieces} for each in made["calls"]]
    rollout = rollout_of({**made, **fields})
    group = [rollout, rollout_of(record(0, 1, None))]
    return ShownRollout("run", "epoch-0000", rollout, rollout.details(), group, {}, "the gateway at http://g")


def on_terminal(rollout: ShownRollout, width: int = 60, **options: Any) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, color_system="standard", legacy_windows=False
    )
    with console.capture() as captured:
        for line in page(rollout, console, **options):
            console.print(line, soft_wrap=True)
    return captured.get()


def test_tokens_have_the_colour_of_what_becomes_of_them_and_a_shade_by_their_probability() -> None:
    text = on_terminal(shown())
    trained, context = text.split("call 3/3")
    assert "\x1b[2;32mBe\x1b[0m\x1b[1;32mcau\x1b[0m\x1b[7;32mse.\\x1b[31m\x1b[0m" in trained
    assert "\x1b[2;34mBe\x1b[0m\x1b[1;34mcau\x1b[0m\x1b[7;34mse.\\x1b[31m\x1b[0m" in context
    assert "probability when sampled" in text


def test_on_a_narrow_terminal_no_line_of_a_model_begins_at_the_margin() -> None:
    long = shown(output="word " * 40 + "x" * 200, input=f"{LINES}\n\n{LINES}")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(long, width=40))
    assert "  │ xxxx" in plain
    words = [line for line in plain.splitlines() if "word" in line or "xxx" in line]
    assert len(words) > 8
    assert all(line.startswith("  │ ") and len(line) <= 40 for line in words)
    assert "  │ two\n  │ \n  │ one" in plain


@pytest.mark.parametrize(
    ("arguments", "complaint", "hint"),
    [
        (["list", "nowhere"], "nowhere does not exist", "runs near it: run"),
        (["list", "some/where"], "some/where does not exist", "output_dir of a run"),
        (["list", "."], "is no run", "runs near it: .*run"),
        (["show", "run", "e9.9"], "no rollout .* has 'e9.9' in its id", "insitu trajectories list"),
        (["show", "run", "e0.0"], "2 rollouts have 'e0.0' in their id: run.e0.0.0.abcd00, run", "more of it"),
        (["list", "run", "--epoch", "7"], "no rollouts of epoch 7", "epoch-0000, epoch-0001"),
        (["list", "run/trajectories"], "is no run", "output_dir of a run"),
    ],
)
def test_errors_name_what_exists(
    run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str, hint: str
) -> None:
    monkeypatch.chdir(run.parent)
    with pytest.raises(InsituError, match=complaint) as caught:
        CliRunner().invoke(trajectories, arguments, catch_exceptions=False)
    assert re.search(hint, caught.value.hint)


def test_an_unknown_ending_is_refused_with_those_there_are(run: Path) -> None:
    result = CliRunner().invoke(trajectories, ["list", str(run), "--ending", "odd"], standalone_mode=False)
    assert isinstance(result.exception, click.BadParameter)
    assert "completed, length" in result.exception.message


def test_a_run_is_found_by_its_configuration_file(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text(f"finetuning: {{output_dir: {run}}}")
    assert insitu("list", str(file)) == insitu("list", str(run))


def test_a_run_under_way_can_be_looked_at_and_is_left_alone(run: Path) -> None:
    file = run / "trajectories" / "epoch-0000.jsonl"
    with file.open("ab") as half:
        half.write(b'{"rollout_id": "run.e0.9')
    before = file.read_bytes()
    lock = (run / ".lock").read_bytes()
    assert "run.e0.0.0.abcd00" in insitu("list", str(run))
    assert (file.read_bytes(), (run / ".lock").read_bytes()) == (before, lock)


def test_a_reader_that_goes_away_is_no_error(run: Path) -> None:
    command = [sys.executable, "-m", "insitu.cli", "trajectories", "list", str(run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(30) == 0


def test_no_address_but_the_gateway_of_the_trained_model_is_asked(tmp_path: Path) -> None:
    from insitu.harness.screen.run_reader import RunReader

    llms = {"judge": {"model_name": "gpt", "base_url": "https://elsewhere/v1"}}
    adapter: dict[str, Any] = {"a": {"backend": {"name": "run", "base_model": "base", "ip": "10.0.0.1"}}}
    config: dict[str, Any] = {
        "llms": llms,
        "trainer_adapters": adapter,
        "finetuning": {"trainer_adapter": "a"},
    }
    assert RunReader(tmp_path, config, "r", {}).gateway() == ("http://10.0.0.1:8000", "default")
    adapter["a"]["backend"]["tls"] = True
    assert RunReader(tmp_path, config, "r", {}).gateway() == ("https://10.0.0.1:8000", "default")
    llms["policy"] = {"model_name": "base", "base_url": "http://g:1/v1"}
    keys = {"policy": "own", "judge": "secret"}
    assert RunReader(tmp_path, config, "r", keys).gateway() == ("http://g:1", "own")
    assert RunReader(tmp_path, {}, "r", {}).gateway() is None


def test_the_directory_can_be_opened_by_a_run_afterwards(run: Path, tmp_path: Path) -> None:
    insitu("show", str(run), "e0.0.0")
    with make_run(tmp_path).directory as directory:
        assert isinstance(directory, RunDirectory)
        assert len(directory.store("epoch-0000").rollouts()) == 4
