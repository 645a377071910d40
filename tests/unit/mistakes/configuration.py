"""Mistakes in the configuration file."""

from __future__ import annotations

from tests.unit.mistakes.desk import Desk, Mistake, Said, command, config, override, text

SHORT_FORM = "model: tiny\nagent: agent:run\ndata: train.json\nreward: reward:score\n"
LONG_FORM = """
llms: {policy: {model_name: tiny}}
workflow: {_type: python, entry: "agent:run"}
eval:
  general: {dataset: {_type: json, file_path: train.json}}
  evaluators: {correct: {_type: python, entry: "reward:score"}}
finetuning: {enabled: true, reward_function: {name: corect}}
"""


def output_dir_is_a_file(desk: Desk) -> Said:
    desk.write("results", "")
    return desk.run("finetune", "--config_file=config.yml", "-o", "finetuning.output_dir", "results")


def output_dir_below_a_file(desk: Desk) -> Said:
    desk.write("results", "")
    return desk.run("finetune", "--config_file=config.yml", "-o", "finetuning.output_dir", "results/first")


MISTAKES = [
    Mistake("a key is misspelt", config(modle="tiny"), "unknown key", "modle", "did you mean `model`"),
    Mistake(
        "a nested key is misspelt",
        config(training={"learning_rte": 1e-5}),
        "unknown key",
        "training.learning_rte",
        "did you mean `learning_rate`",
    ),
    Mistake(
        "the file does not exist",
        command("finetune", "--config_file=confg.yml"),
        "the file does not exist",
        "confg.yml",
        "did you mean `config.yml`",
    ),
    Mistake("the file is empty", text("config.yml", ""), "is empty", "config.yml", "start with `model`"),
    Mistake(
        "the file is a list",
        text("config.yml", "- model: tiny\n"),
        "holds a list",
        "config.yml",
        "`key: value`",
    ),
    Mistake(
        "a tab indents the YAML",
        text("config.yml", "model: tiny\ntraining:\n\tlearning_rate: 1e-5\n"),
        "cannot start any token",
        "line 3",
        "spaces",
    ),
    Mistake(
        "a key is given twice",
        text("config.yml", "model: tiny\nagent: agent:run\nmodel: other\n"),
        "duplicate keys",
        "line 3: `model`, already on line 1",
        "keep one of each",
    ),
    Mistake(
        "the file is not UTF-8",
        text("config.yml", "model: tiny # gr\xf6\xdfer".encode("latin-1")),
        "is not UTF-8",
        "byte",
        "save the file as UTF-8",
    ),
    Mistake(
        "a folder instead of a file",
        command("finetune", "--config_file=."),
        "is a directory",
        "error: .:",
        "config.yml",
    ),
    Mistake("no model is named", config(model=None), "is missing", "model", "it names the model to train"),
    Mistake("no agent is named", config(agent=None), "is missing", "workflow", "agent"),
    Mistake("no data is named", config(data=None), "is missing", "eval.general.dataset", "--dataset"),
    Mistake(
        "no reward is named",
        config(reward=None),
        "required",
        "finetuning.reward_function",
        "`reward: module:function`",
    ),
    Mistake(
        "a number is written as a word",
        config(training={"learning_rate": "fast"}),
        "should be a valid number",
        "fast",
        "training.learning_rate",
    ),
    Mistake(
        "the learning rate is a thousand times too high",
        config(training={"learning_rate": 10}),
        "less than or equal to 1",
        "10",
        "training.learning_rate",
    ),
    Mistake(
        "the learning rate is infinite",
        text("config.yml", f"{SHORT_FORM}training: {{learning_rate: .inf}}\n"),
        "finite",
        "inf",
        "training.learning_rate",
    ),
    Mistake(
        "a flag where a number belongs",
        config(finetuning={"num_epochs": True}),
        "should be a number",
        "true",
        "finetuning.num_epochs",
    ),
    Mistake(
        "one rollout per example compares nothing",
        config(num_generations=1),
        "judged against others of the same example",
        "num_generations is 1",
        "to 2 or more",
    ),
    Mistake(
        "the method is misspelt", config(training={"method": "gpro"}), "should be", "gpro", "training.method"
    ),
    Mistake(
        "the reward's type is misspelt",
        config(reward={"_type": "exact_mach"}),
        "exact_mach",
        "reward",
        "did you mean `exact_match`",
    ),
    Mistake(
        "the same thing in both forms",
        config(workflow={"_type": "python", "entry": "agent:run"}),
        "says the same as `workflow`",
        "agent",
        "keep one of the two",
    ),
    Mistake(
        "a variable that is not set",
        config(model={"api_key": "${FIRST_HOUR_KEY}"}),
        "is not set",
        "FIRST_HOUR_KEY",
        "export the variable",
    ),
    Mistake(
        "a reward function that is not in the file",
        text("config.yml", LONG_FORM),
        "has no entry `corect`",
        "finetuning.reward_function.name",
        "did you mean `correct`",
    ),
    Mistake(
        "training is not enabled",
        text("config.yml", LONG_FORM.replace("true", "false").replace("corect", "correct")),
        "finetuning.enabled",
        "false",
        "-o finetuning.enabled true",
    ),
    Mistake(
        "two models, and neither is chosen",
        text(
            "config.yml",
            LONG_FORM.replace("tiny}}", "tiny}, other: {model_name: big}}").replace("corect", "correct"),
        ),
        "which of `llms` is trained",
        "policy, other",
        "finetuning.target_model",
    ),
    Mistake(
        "the run's name has capitals and blanks",
        config(backend={"name": "My Run"}),
        "a-z, 0-9",
        "My Run",
        "backend.name",
    ),
    Mistake(
        "the host is a whole address",
        config(backend={"ip": "http://localhost"}),
        "is more than a host",
        "http://localhost",
        "write only the host: localhost",
    ),
    Mistake(
        "the backend's address has a path",
        text("config.yml", f"{SHORT_FORM}backend: http://127.0.0.1:7623/v1\n"),
        "should be an address",
        "http://127.0.0.1:7623/v1",
        "such as http://127.0.0.1:7623",
    ),
    Mistake(
        "a limit of the model is misspelt",
        config(backend={"init_args": {"max_seq_len": 2048}}),
        "unknown argument",
        "backend.init_args.max_seq_len",
        "did you mean `max_seq_length`",
    ),
    Mistake(
        "a limit of the model among the engine's settings",
        config(backend={"engine_args": {"max_seq_length": 2048}}),
        "belongs to init_args",
        "backend.engine_args.max_seq_length",
        "init_args",
    ),
    Mistake(
        "a setting without the one it needs",
        text("config.yml", LONG_FORM.replace("reward_function: {name: corect}", "max_refill: 2")),
        "max_refill needs groups_per_step",
        "finetuning",
        "groups_per_step",
    ),
    Mistake(
        "the warm-up is longer than the run",
        override("trainer_adapters.backend.schedule.warmup_steps", "50"),
        "warmup_steps",
        "50",
        "finetuning.num_epochs",
    ),
    Mistake(
        "the output directory is a file",
        output_dir_is_a_file,
        "is a file",
        "results",
        "-o finetuning.output_dir",
    ),
    Mistake(
        "the output directory cannot be made",
        output_dir_below_a_file,
        "cannot be written",
        "results/first",
        "-o finetuning.output_dir",
    ),
]
