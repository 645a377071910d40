"""Mistakes on the command line."""

from __future__ import annotations

from tests.unit.mistakes.desk import DRY_RUN, Mistake, command, override

FINETUNE = ("finetune", "--config_file=config.yml")
MISTAKES = [
    Mistake(
        "a command is misspelt", command("finetun"), "No such command", "finetun", "did you mean `finetune`"
    ),
    Mistake(
        "an option is misspelt", command(*FINETUNE, "--dryrun"), "No such option", "--dryrun", "--dry-run"
    ),
    Mistake(
        "no configuration is named",
        command("finetune"),
        "Missing option",
        "--config_file",
        "insitu finetune --help",
    ),
    Mistake(
        "an option without the one it belongs to",
        command(*FINETUNE, "--show-config"),
        "needs --dry-run",
        "--show-config",
        "--dry-run",
    ),
    Mistake(
        "an override with one word",
        command(*DRY_RUN, "-o", "finetuning.num_epochs=3"),
        "requires 2 arguments",
        "-o",
        "insitu finetune --help",
    ),
    Mistake(
        "an override of a key that does not exist",
        override("finetuning.num_epoch", "3"),
        "has no `num_epoch`",
        "finetuning.num_epoch",
        "did you mean `num_epochs`",
    ),
    Mistake(
        "an override of a wrong kind",
        override("finetuning.num_epochs", "many"),
        "cannot be read as a whole number",
        "many",
        "finetuning.num_epochs",
    ),
    Mistake(
        "an option out of range",
        command(*FINETUNE, "--validation_interval", "0"),
        "greater than or equal to 1",
        "--validation_interval",
        "insitu finetune --help",
    ),
    Mistake(
        "a dataset of an unknown kind",
        command(*DRY_RUN, "--dataset", "train.txt"),
        "names no type of dataset",
        "train.txt",
        ".jsonl",
    ),
    Mistake(
        "a comparison with one model",
        command("eval", "base", "--config_file=config.yml"),
        "takes 2 values",
        "models",
        "insitu eval --help",
    ),
    Mistake(
        "a comparison without validation data",
        command("eval", "base", "first@3", "--config_file=config.yml"),
        "no validation dataset",
        "validation",
        "--validation_dataset",
    ),
    Mistake(
        "a model that is no model",
        command("eval", "base", "first@last", "--config_file=config.yml"),
        "does not name a model",
        "first@last",
        "<run>@<step>",
    ),
    Mistake(
        "a run that is not there",
        command("trajectories", "list", "output/first"),
        "does not exist",
        "output/first",
        "finetuning.output_dir",
    ),
    Mistake(
        "the rollouts of a run that never began",
        command("trajectories", "list", "config.yml"),
        "does not exist",
        "the output_dir of config.yml",
        "insitu finetune --config_file=config.yml",
    ),
    Mistake(
        "no backend to ask",
        command("runs", "list", "--url", "http://127.0.0.1:9"),
        "no insitu backend answers",
        "http://127.0.0.1:9",
        "insitu serve",
    ),
    Mistake(
        "an address that is none",
        command("runs", "list", "--url", "localhost:7623"),
        "has no scheme",
        "localhost:7623",
        "write http://localhost:7623",
    ),
    Mistake(
        "a lifetime without a unit",
        command("keys", "create", "ci", "--scope", "infer", "--expires", "30", "--state-dir", "state"),
        "is not a time",
        "'30'",
        "30d",
    ),
    Mistake(
        "a scope that does not exist",
        command("keys", "create", "ci", "--scope", "train", "--state-dir", "state"),
        "is not one of",
        "'train'",
        "'submit'",
    ),
]
