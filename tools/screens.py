"""Draw the pictures of the documentation: the screen of `insitu finetune` at two widths.

    python tools/screens.py docs/images

The figures are made up: a run of 20 epochs that learns, with an agent whose tool fails at first.
"""

from __future__ import annotations

import io
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from insitu.harness.files.metrics import StepLine, ValidationEntry
from insitu.harness.screen.entries import Course, Entry, Line
from insitu.harness.screen.figures import Figures
from insitu.harness.screen.live_screen import display
from insitu.harness.screen.safe_output import printable
from insitu.harness.screen.step_table import StepTable
from insitu.harness.verdicts.run_settings import RunSettings
from insitu.harness.verdicts.verdict import with_verdict
from insitu.types import Ending

NUM_EPOCHS = 20
NUM_DONE = 14
WIDTHS = (80, 140)
CAUSES = """failed rollouts by cause:
52 × tool_error: KeyError: 'result', at agent.py:41 in add (first: run_a1b2c3d4-e0-i3-g5)
6 × timeout: no answer within 120 s (first: run_a1b2c3d4-e0-i11-g0)"""
_THEME = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)


def steps(count: int = NUM_DONE) -> list[StepLine]:
    """Return the lines of a run that rises from 0.1 towards 0.9."""
    noise, lines = random.Random(4), list[StepLine]()
    settings = RunSettings(NUM_EPOCHS, "adder", "builder", "adapter", "sums", "output")
    for epoch in range(count):
        reward = 0.09 + 0.83 / (1 + math.exp(-(epoch - 7) / 2.4)) + noise.gauss(0, 0.025)
        spread = 0.3 * math.sin(math.pi * min(max(reward, 0.1), 0.9))
        failed = 58 if epoch == 0 else noise.choice((0, 0, 1, 3))
        equal = round((128 - failed) * (0.1 + 0.35 * abs(reward - 0.5)))
        lines.append(with_verdict(lines, _step(epoch, reward, spread, failed, equal, noise), settings))
    return lines


def _step(
    epoch: int, reward: float, spread: float, failed: int, equal: int, noise: random.Random
) -> StepLine:
    trained = 128 - failed - equal
    dropped = {name: count for name, count in (("failed", failed), ("zero_variance", equal)) if count}
    return {
        "epoch": epoch,
        "step": epoch + 1,
        "run_id": "run_a1b2c3d4",
        "timestamp": f"2026-01-01T00:{epoch:02}:00",
        "avg_reward": reward,
        "min_reward": max(0.0, reward - 2 * spread),
        "max_reward": min(1.0, reward + 2 * spread),
        "num_trajectories": 128,
        "num_groups": 16,
        "filtered_avg_reward": reward * 0.97,
        "filtered_min_reward": 0.0,
        "filtered_max_reward": 1.0,
        "filtered_num_trajectories": trained,
        "filtered_num_groups": 14,
        "curriculum_percentile": 1.0,
        "curriculum_state": {
            "current_percentile": 1.0,
            "last_expansion_epoch": 0,
            "total_groups": 16,
            "included_groups": 16,
        },
        "account": {
            "total": 128,
            "trained": trained,
            "truncated": 0,
            "dropped": dropped,
            "endings": {"tool_error": failed} if failed else {},
            "line": f"trained {trained}/128",
        },
        "num_rewarded": 128 - failed,
        "training": {
            "loss": -0.004 + noise.gauss(0, 0.01),
            "entropy": 0.92 * math.exp(-epoch / 14) + noise.gauss(0, 0.01),
            "mismatch/kl": 4.2e-4 * (1 + noise.random()),
            "mismatch/mean_abs": 0.009,
            "reward/std": spread,
        },
    }


def validations(lines: list[StepLine]) -> list[ValidationEntry]:
    """Return a validation before training and after every fifth epoch."""
    noise = random.Random(9)
    found: list[ValidationEntry] = []
    for epoch in range(0, len(lines) + 1, 5):
        rewards = [line["avg_reward"] or 0.0 for line in lines[max(0, epoch - 2) : epoch + 1]]
        found.append(_validation(epoch, sum(rewards) / len(rewards) - 0.02 + noise.gauss(0, 0.01)))
    return found


def _validation(epoch: int, reward: float) -> ValidationEntry:
    return {
        "epoch": epoch,
        "step": epoch,
        "run_id": "run_a1b2c3d4",
        "timestamp": f"2026-01-01T00:{epoch:02}:30",
        "avg_reward": reward,
        "min_reward": 0.0,
        "max_reward": 1.0,
        "num_examples": 32,
        "num_failed": 0,
        "endings": {"completed": 128},
        "standard_error": 0.5 * math.sqrt(max(reward * (1 - reward), 0.01) / 32),
        "num_samples": 4,
    }


def entries() -> Iterator[Entry]:
    """Yield what the run has shown so far."""
    course, lines = Course(), steps()
    checked = {entry["step"]: entry for entry in validations(lines)}
    noise = random.Random(2)
    for line in lines:
        if line["epoch"] in checked and (row := course.validation(checked[line["epoch"]])) is not None:
            yield row
        if line["epoch"] == 0:
            yield Line("WARNING", printable(CAUSES))
        yield course.step(line, NUM_EPOCHS, 74 if line["epoch"] == 0 else 38 + 6 * noise.random())


def footer() -> Figures:
    """Return the figures in the middle of the next epoch."""
    now = [0.0]
    figures = Figures(lambda: now[0])
    now[0] += 620
    figures.epoch_ended(NUM_DONE, NUM_EPOCHS, 0.8, "", 41.0)
    figures.verdict(steps()[-1].get("verdict", {"sentence": ""})["sentence"], warning=False)
    figures.phase_started(f"epoch {NUM_DONE + 1}/{NUM_EPOCHS}", 128)
    for _ in range(32):
        figures.rollout_started()
    now[0] += 12
    for number in range(73):
        ending = Ending.TIMEOUT if number == 40 else Ending.COMPLETED
        figures.rollout_ended(ending, None if number == 40 else 0.86, 61, 4.4)
        figures.rollout_started()
    return figures


def draw(width: int) -> Console:
    """Return a console that has recorded the screen at this width."""
    console = Console(
        file=io.StringIO(),
        width=width,
        height=50,
        force_terminal=True,
        color_system="truecolor",
        record=True,
        markup=False,
        emoji=False,
        highlight=False,
    )
    table = StepTable()
    for entry in entries():
        console.print(table.render(entry, width), end="", soft_wrap=True)
    console.print(display(footer().snapshot(), width))
    return console


def main() -> None:
    """Write the pictures into the directory that is given."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/screens.py DIRECTORY")
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        console = draw(width)
        picture = console.export_svg(title="insitu finetune", theme=_THEME, clear=False, unique_id="insitu")
        (target / f"finetune-{width}.svg").write_text(picture)


if __name__ == "__main__":
    main()
