"""The end of a run: what is said, the commands, the exit code."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

from insitu.harness.gains.gain import Gain
from insitu.harness.gains.interval import Interval
from insitu.harness.rollouts.capture import Capture
from insitu.harness.screen.summary import Summary, exit_code, lines

GOOD = Summary(
    outcome="succeeded",
    reason="",
    run_id="run_a1b2c3d4",
    epochs_done=20,
    num_epochs=20,
    updates=18,
    reward_before=0.4,
    reward_after=0.6,
    best_step=15,
    best_reward=0.65,
    checkpoint_path="/data/my runs/adder/checkpoints/000015",
    base_model="Qwen/Qwen2.5-3B-Instruct",
    model_name="adder",
    gateway_url="http://127.0.0.1:8000",
    output_dir="out",
    resume_command="insitu finetune --config_file='my file.yml'",
)


def _command(summary: Summary, program: str) -> list[str]:
    (line,) = [line for line in lines(summary) if line.startswith(f"  {program} ")]
    return shlex.split(line)


def test_a_good_run_says_what_it_gained_and_how_to_use_it() -> None:
    text = "\n".join(lines(GOOD))
    assert "0.4000 before, 0.6000 after (+0.2000, 1.50 times)" in text
    assert "step 15, reward 0.6500" in text
    assert GOOD.resume_command not in text
    assert exit_code(GOOD) == 0


def test_the_model_calls_of_all_epochs_are_accounted_for() -> None:
    calls = Capture(seen=12, trained=8, context_only={"other_model": 4})
    (line,) = [line for line in lines(replace(GOOD, calls=calls)) if "model calls" in line]
    assert line == "  model calls        12 seen = 8 trained + 4 context-only (other-model 4)"


def test_the_last_verdict_is_told() -> None:
    (line,) = [line for line in lines(replace(GOOD, verdict="level: \x1b[2J 0.6")) if "verdict" in line]
    assert line == "  verdict            level: \\x1b[2J 0.6"
    assert not [line for line in lines(GOOD) if "verdict" in line]


def test_the_curl_line_asks_the_newest_step_which_is_always_served() -> None:
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"):
        words = _command(replace(GOOD, gateway_url=url), "curl")
        assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
        assert json.loads(words[-1])["model"] == "adder"
        assert "Authorization: Bearer ${INSITU_API_KEY:-default}" in words
    newest = _command(replace(GOOD, best_step=None), "curl")
    assert json.loads(newest[-1])["model"] == "adder"


def test_the_vllm_line_is_quoted_and_survives_odd_paths() -> None:
    words = _command(replace(GOOD, base_path="/models/my small one"), "python")
    assert words == [
        *("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/my small one"),
        *("--enable-lora", "--lora-modules"),
        "adder=/data/my runs/adder/checkpoints/000015/adapter",
    ]
    # What has a comma is JSON to vLLM.
    odd = _command(replace(GOOD, base_path="/m", checkpoint_path="/a,b'c"), "python")
    assert json.loads(odd[-1]) == {"name": "adder", "path": "/a,b'c/adapter"}
    large = _command(replace(GOOD, lora_rank=48), "python")
    assert large[large.index("--max-lora-rank") + 1] == "64"


def test_elsewhere_the_vllm_line_reads_the_base_model_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "it's here"
    (checkpoint / "adapter").mkdir(parents=True)
    config = checkpoint / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": "/models/my small one"}))
    server = "python -m vllm.entrypoints.openai.api_server --model"
    (line,) = [line for line in lines(replace(GOOD, checkpoint_path=str(checkpoint))) if server in line]
    printed = line.strip().replace(server, "printf '%s\\n'", 1)
    words = subprocess.run(
        ["sh", "-c", printed], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert words[:2] == ["/models/my small one", "--enable-lora"]
    assert words[-1] == f"adder={checkpoint}/adapter"


def test_a_failure_starts_with_the_reason_and_says_how_to_go_on() -> None:
    reason = "job 7 failed: out of memory\n  next: lower max_seq_length"
    failed = replace(GOOD, outcome="failed", reason=reason, epochs_done=3, updates=3, reward_after=None)
    said = lines(failed)
    assert said[0] == "FAILED - job 7 failed: out of memory\n    next: lower max_seq_length"
    assert said.index(f"  {failed.resume_command}") < 4
    assert "0.4000 before, not measured after" in "\n".join(said)
    assert exit_code(failed) == 1


def test_a_failure_before_the_first_update_offers_no_model() -> None:
    nothing = {"reward_before": None, "reward_after": None, "best_step": None, "best_reward": None}
    failed = replace(GOOD, outcome="failed", reason="no backend", updates=0, checkpoint_path=None, **nothing)
    text = "\n".join(lines(failed))
    assert "none: no update was made" in text
    assert "curl" not in text
    assert "vllm" not in text
    assert "no validation data" not in text  # it may exist: nothing was measured


def test_an_interruption_shows_the_exact_command() -> None:
    interrupted = replace(GOOD, outcome="interrupted", epochs_done=1, updates=1)
    said = lines(interrupted)
    assert said[0].startswith("Interrupted")
    assert "1 of 20 epochs, 1 update." in said[0]
    assert said[1] == f"  {GOOD.resume_command}"
    assert exit_code(interrupted) == 130


def test_without_validation_or_gain_it_says_so() -> None:
    without = replace(GOOD, reward_before=None, reward_after=None)
    assert "no validation data" in "\n".join(lines(without))
    worse = replace(GOOD, reward_before=-0.5, reward_after=-0.75, best_step=0, best_reward=-0.5)
    text = "\n".join(lines(worse))
    assert "(-0.2500)" in text  # no ratio of negative figures
    assert "none: the model was best before training" in text
    assert "vllm" not in text


def test_a_reason_from_elsewhere_cannot_steer_the_terminal() -> None:
    said = lines(replace(GOOD, outcome="failed", reason="\x1b[2Jboo\nFinished. All is well"))
    assert said[0] == "FAILED - \\x1b[2Jboo\n    Finished. All is well"


def test_the_gain_is_shown_with_its_errors_and_the_second_measurement() -> None:
    measured = replace(
        GOOD,
        error_before=0.05,
        error_after=0.041,
        best_remeasured="0.6160 ± 0.0410",
        gain=Gain(0.216, Interval(0.1, 0.3, 0.95), 0.95, 32),
    )
    text = "\n".join(lines(measured))
    assert "0.4000 ± 0.0500 before, 0.6000 ± 0.0410 after (+0.2000, 1.50 times)" in text
    assert "step 15, reward 0.6160 ± 0.0410 measured again (0.6500 when chosen), /data" in text
    said = "The difference of these two checkpoints is real: step 15 is better than step 0 (+0.216, "
    assert f"  gain               {said}" in text
    assert "gain" not in "\n".join(lines(GOOD))
