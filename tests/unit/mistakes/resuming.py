"""Mistakes when a run is started a second time."""

from __future__ import annotations

from pathlib import Path

from insitu.config.dump import dump_config
from insitu.config.load import load_config
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.rollouts.rollout import Rollout
from insitu.types import Ending
from tests.unit.mistakes.desk import Desk, Mistake, Said

FINETUNE = ("finetune", "--config_file=config.yml")
ROLLOUT = Rollout("run_0.e0.0.0.aaaaaaaa", "0", 0, Ending.COMPLETED, 1.0)


def begun(desk: Desk) -> RunDirectory:
    """The run of the configuration as it is now, with one rollout."""
    found = RunDirectory.open(Path("output/first"), dump_config(load_config("config.yml").config))
    found.store("epoch-0000").append(ROLLOUT)
    return found


def another_configuration(desk: Desk) -> Said:
    begun(desk).close()
    desk.configure(training={"learning_rate": 1e-4})
    return desk.run(*FINETUNE)


def still_running(desk: Desk) -> Said:
    with begun(desk):
        return desk.run(*FINETUNE)


def directory_of_something_else(desk: Desk) -> Said:
    (desk.path / "output/first").mkdir(parents=True)
    desk.write("output/first/config.json", "{}")
    desk.write("output/first/journal.jsonl", "{}")
    return desk.run(*FINETUNE)


def unknown_rollout(desk: Desk) -> Said:
    begun(desk).close()
    return desk.run("trajectories", "show", "output/first", "e7.0.0")


def unknown_epoch(desk: Desk) -> Said:
    begun(desk).close()
    return desk.run("trajectories", "list", "output/first", "--epoch", "9")


def unknown_ending(desk: Desk) -> Said:
    begun(desk).close()
    return desk.run("trajectories", "list", "output/first", "--ending", "failed")


MISTAKES = [
    Mistake(
        "another configuration in the same directory",
        another_configuration,
        "has another configuration",
        "learning_rate",
        "output_dir",
    ),
    Mistake(
        "the run is still under way",
        still_running,
        "another process",
        "output/first",
        "-o finetuning.output_dir",
    ),
    Mistake(
        "the directory is something else's",
        directory_of_something_else,
        "is not the configuration of a run",
        "output/first",
        "output_dir",
    ),
    Mistake("a rollout that is not there", unknown_rollout, "e7.0.0", "e7.0.0", "insitu trajectories list"),
    Mistake(
        "an epoch that is not there",
        unknown_epoch,
        "has no rollouts of epoch 9",
        "epoch 9",
        "it has epoch-0000",
    ),
    Mistake("an ending that does not exist", unknown_ending, "is none of", "failed", "completed"),
]
