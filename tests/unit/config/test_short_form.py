"""The short form of a file: what may be left out, and what is said about what is wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from insitu.config import load_config, parse_config
from insitu.config.config import Config
from insitu.errors import InvalidRequest
from insitu.harness.interfaces.settings import AdapterConfig
from insitu.types import StepSettings

Write = Callable[[str], Path]

SHORT = """
model: smollm2
agent: agent:answer
data: data/train.json
reward: reward:score
"""

LONG = """
llms:
  policy: {_type: openai, model_name: smollm2}
workflow: {_type: python, entry: "agent:answer"}
eval:
  general:
    max_concurrency: 64
    dataset: {_type: json, file_path: data/train.json}
  evaluators:
    reward: {_type: python, entry: "reward:score"}
trajectory_builders:
  groups: {_type: insitu, num_generations: 8}
trainer_adapters:
  backend:
    _type: insitu
    backend:
      {ip: 127.0.0.1, port: 7623, name: adder, base_model: smollm2, api_key: "${INSITU_API_KEY:-default}"}
trainers:
  epochs: {_type: insitu}
finetuning:
  enabled: true
  trainer: epochs
  trajectory_builder: groups
  trainer_adapter: backend
  reward_function: {name: reward}
  output_dir: output/adder
  groups_per_step: 8
"""


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INSITU_API_KEY", raising=False)


def at(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def refused(path: Path, *overrides: tuple[str, str]) -> str:
    with pytest.raises(InvalidRequest) as error:
        load_config(path, overrides)
    return error.value.message


@pytest.mark.parametrize("key", [None, "12345"])
def test_short_and_long_load_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    if key is not None:
        monkeypatch.setenv("INSITU_API_KEY", key)
    short = load_config(at(tmp_path, "adder.yml", SHORT))
    long = load_config(at(tmp_path, "long.yml", LONG))
    assert short.config == long.config
    assert short.config.trainer_adapters["backend"] == long.config.trainer_adapters["backend"]


def test_every_key_has_its_place(tmp_path: Path) -> None:
    text = """
model: {model_name: smollm2, temperature: 1.0, max_tokens: 12}
agent: {entry: "agent:answer", args: {depth: 2}}
data: {file_path: rows.csv, id_key: number}
validation: held_out.json
reward: {entry: "reward:score"}
num_generations: 4
backend: https://10.0.0.5:7000
training: {learning_rate: 5e-4}
finetuning: {num_epochs: 25}
"""
    long = LONG.replace("model_name: smollm2}", "model_name: smollm2, temperature: 1.0, max_tokens: 12}")
    long = long.replace('entry: "agent:answer"}', 'entry: "agent:answer", args: {depth: 2}}')
    long = long.replace(
        "_type: json, file_path: data/train.json", "_type: csv, file_path: rows.csv, id_key: number"
    )
    long = long.replace("num_generations: 8", "num_generations: 4")
    long = long.replace("ip: 127.0.0.1, port: 7623", "ip: 10.0.0.5, port: 7000, tls: true")
    long = long.replace("trainers:", "    training: {learning_rate: 5e-4}\ntrainers:")
    long += "  num_epochs: 25\n  run_configuration: {validation_dataset: held_out.json}\n"
    assert (
        load_config(at(tmp_path, "adder.yml", text)).config == load_config(at(tmp_path, "l.yml", long)).config
    )


@pytest.mark.parametrize(
    ("more", "groups"),
    [
        ("", 8),
        ("finetuning: {groups_per_step: 3}", 3),
        ("finetuning: {groups_per_step: null}", None),
        ("trajectory_builders: {mine: {_type: insitu}}", None),
        ("trainers: {mine: {_type: insitu}}", None),
    ],
)
def test_an_update_is_made_of_eight_groups_unless_a_part_is_named(
    tmp_path: Path, more: str, groups: int | None
) -> None:
    config = load_config(at(tmp_path, "adder.yml", SHORT + more)).config
    assert config.finetuning.groups_per_step == groups


@pytest.mark.parametrize(
    ("key", "value", "place", "loaded"),
    [
        (
            "agent",
            "http://localhost:9000/run",
            "workflow",
            {"_type": "http", "url": "http://localhost:9000/run"},
        ),
        (
            "agent",
            "{command: [node, agent.js]}",
            "workflow",
            {"_type": "command", "command": ["node", "agent.js"]},
        ),
        ("data", "rows.parquet", "eval.general.dataset", {"_type": "parquet", "file_path": "rows.parquet"}),
        ("data", "rows:make", "eval.general.dataset", {"_type": "custom", "function": "rows:make"}),
        ("reward", "exact_match", "eval.evaluators.reward", {"_type": "exact_match"}),
        (
            "reward",
            "{_type: numeric, tolerance: 1}",
            "eval.evaluators.reward",
            {"_type": "numeric", "tolerance": 1},
        ),
        ("backend", "10.0.0.5", "trainer_adapters.backend.backend", {"ip": "10.0.0.5"}),
    ],
)
def test_what_a_text_stands_for(
    write: Write, key: str, value: str, place: str, loaded: dict[str, object]
) -> None:
    kept = "\n".join(line for line in SHORT.splitlines() if not line.startswith(key))
    found: object = load_config(write(f"{kept}\n{key}: {value}\n")).source
    for part in place.split("."):
        assert isinstance(found, dict)
        found = found[part]
    assert isinstance(found, dict)
    assert {name: found[name] for name in loaded} == loaded


def test_parts_of_the_long_form_may_be_left_out(write: Write) -> None:
    """Without a short key: entries without `_type` are native, and the only entry is the one meant."""
    text = (
        LONG[: LONG.index("trajectory_builders")]
        + """
trajectory_builders: {mine: {num_generations: 3}}
finetuning: {enabled: true, output_dir: output}
"""
    )
    config = load_config(write(text)).config
    assert config.finetuning.trajectory_builder == "mine"
    assert config.trajectory_builders["mine"].type_name == "insitu"
    assert (config.finetuning.trainer, config.finetuning.trainer_adapter) == ("epochs", "backend")
    assert config.finetuning.reward_function is not None
    assert config.finetuning.reward_function.name == "reward"
    assert config.trainer_adapters["backend"].model_dump()["backend"]["base_model"] == "smollm2"
    assert config.eval.general.max_concurrency == 64
    text = text.replace("enabled: true", "enabled: false").replace(
        "{num_generations", "{_type: insitu, num_generations"
    )
    off = load_config(write(text)).config
    assert off.finetuning.trainer is None
    assert off.trainers == {}


def test_models_of_the_long_form_keep_their_defaults(write: Write) -> None:
    text = LONG.replace(", num_generations: 8", "").replace(", base_model: smollm2", "")
    config = load_config(write(text)).config
    assert config.trajectory_builders["groups"].model_dump()["num_generations"] == 2
    assert (
        config.trainer_adapters["backend"].model_dump()["backend"]["base_model"] == "Qwen/Qwen2.5-7B-Instruct"
    )


@pytest.mark.parametrize(
    ("file", "output_dir", "name"),
    [
        ("adder.yml", None, "adder"),
        ("config.yml", None, "my-project"),
        ("config.yml", "output/second_try", "second_try"),
        ("Hard Ones!.yml", "output", "hard-ones"),
    ],
)
def test_the_name_of_the_run(tmp_path: Path, file: str, output_dir: str | None, name: str) -> None:
    path = at(tmp_path / "My Project", file, SHORT)
    given = [] if output_dir is None else [("finetuning.output_dir", output_dir)]
    config = load_config(path, given).config
    assert config.trainer_adapters["backend"].model_dump()["backend"]["name"] == name
    assert config.finetuning.output_dir == Path(output_dir or f"output/{name}")


def test_overrides_by_either_name(tmp_path: Path) -> None:
    overrides = [
        ("model", "tiny"),
        ("model.temperature", "0.5"),
        ("data", "other.jsonl"),
        ("num_generations", "3"),
        ("training.learning_rate", "1e-4"),
        ("trainer_adapters.backend.backend.port", "7000"),
        ("finetuning.num_epochs", "4"),
    ]
    config = load_config(at(tmp_path, "adder.yml", SHORT), overrides).config
    adapter = config.trainer_adapters["backend"].model_dump()
    assert (config.llms["policy"].model_name, config.llms["policy"].temperature) == ("tiny", 0.5)
    assert config.eval.general.dataset is not None
    assert config.eval.general.dataset.type_name == "jsonl"
    assert config.trajectory_builders["groups"].model_dump()["num_generations"] == 3
    assert (adapter["backend"]["base_model"], adapter["backend"]["port"]) == ("tiny", 7000)
    assert adapter["training"]["learning_rate"] == 1e-4
    assert config.finetuning.num_epochs == 4


def test_variables_in_short_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "123")
    monkeypatch.setenv("COUNT", "5")
    text = SHORT.replace("model: smollm2", "model: ${MODEL}") + "num_generations: ${COUNT}\n"
    config = load_config(at(tmp_path, "adder.yml", text)).config
    assert config.llms["policy"].model_name == "123"
    assert config.trajectory_builders["groups"].model_dump()["num_generations"] == 5
    text = SHORT.replace("model: smollm2", "model: {model_name: '${MODEL}'}")
    config = load_config(at(tmp_path, "adder.yml", text)).config
    assert config.llms["policy"].model_name == "123"
    assert config.trainer_adapters["backend"].model_dump()["backend"]["base_model"] == "123"


def test_another_model_beside_the_trained_one(write: Write) -> None:
    config = load_config(
        write(SHORT + "llms: {judge: {model_name: smollm2, base_url: 'http://judge/v1'}}\n")
    ).config
    assert config.finetuning.target_model == "policy"
    assert sorted(config.llms) == ["judge", "policy"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("model: smollm2", "modle: smollm2", "modle: unknown key; did you mean `model`?"),
        ("model: smollm2", "", "model: is missing; it names the model to train"),
        ("model: smollm2", "model: 5", "model: should be the name of a model, or a mapping, not 5"),
        ("model: smollm2", "model: {temperature: 1}", "model.model_name: is missing"),
        (
            "model: smollm2",
            "model: {name: x, temperature: hot}",
            "model.temperature: should be a valid number",
        ),
        ("agent: agent:answer", "agent: answer", "agent: should be module:function or the URL of a service"),
        ("agent: agent:answer", "agent: 'agent: answer'", "agent: String should match pattern"),
        ("agent: agent:answer", "agent: {llm: policy}", "agent._type: is missing; known: "),
        ("agent: agent:answer", "agent: {entry: 'a:b', lm: x}", "agent.lm: unknown key; did you mean `llm`?"),
        (
            "data: data/train.json",
            "data: data/train.txt",
            "data: should be a file or module:function, not 'data/",
        ),
        ("reward: reward:score", "reward: exact_mach", "did you mean `exact_match`?"),
        ("reward: reward:score", "", "finetuning.reward_function: required when finetuning.enabled is true"),
        (
            "reward: reward:score",
            "reward: reward:score\nworkflow: {}",
            "agent: says the same as `workflow`: keep",
        ),
        (
            "reward: reward:score",
            "reward: reward:score\ntraining: {}\ntrainer_adapters: {a: {}}",
            "training: says the same as `trainer_adapters`",
        ),
        (
            "reward: reward:score",
            "reward: r:s\ntraining: {learning_rat: 1}",
            "training.learning_rat: unknown key; did you mean `learning_rate`?",
        ),
        (
            "reward: reward:score",
            "reward: r:s\nbackend: 'http://h/v1'",
            "backend: should be an address such as",
        ),
        (
            "reward: reward:score",
            "reward: r:s\nnum_generations: 0",
            "num_generations: should be greater than or",
        ),
        ("reward: reward:score", "reward: r:s\neval: []", "eval: should be a mapping"),
        (
            "reward: reward:score",
            "reward: r:s\ntrainers: {a: {}, b: {}}",
            "finetuning.trainer: required when finetuning.enabled is true; it names an entry of `trainers` "
            "(it has: a, b)",
        ),
    ],
)
def test_what_is_refused(write: Write, old: str, new: str, said: str) -> None:
    assert old in SHORT
    assert said in refused(write(SHORT.replace(old, new)))


def test_which_model_is_trained_must_be_clear(write: Write) -> None:
    text = LONG[: LONG.index("trajectory_builders")] + "finetuning: {enabled: true}\n"
    text = text.replace("workflow:", "  other: {model_name: tiny}\nworkflow:")
    assert (
        "finetuning.target_model: required: which of `llms` is trained? (it has: policy, other)"
        in refused(write(text))
    )
    backend = load_config(write(text), [("finetuning.target_model", "other")]).config.trainer_adapters[
        "backend"
    ]
    assert backend.model_dump()["backend"]["base_model"] == "tiny"


def test_values_that_are_already_loaded() -> None:
    config = parse_config({"model": "m", "agent": "a:b", "data": "d.json", "reward": "r:s"})
    assert config.finetuning.output_dir == Path("output/run")


@pytest.mark.parametrize(
    ("change", "rate"),
    [
        (("smollm2", "Qwen/Qwen2.5-3B-Instruct"), 9e-5),
        (("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"), 5e-4),
        (("smollm2", "smollm2"), 5e-5),
    ],
    ids=["3B", "135M", "a name without a size"],
)
def test_the_rate_follows_the_size_of_the_model(tmp_path: Path, change: tuple[str, str], rate: float) -> None:
    for text in (SHORT, LONG):
        config = load_config(at(tmp_path, "adder.yml", text.replace(*change))).config
        assert training_of(config).learning_rate == rate


def test_the_rate_follows_alpha_and_the_batch_and_gives_way_to_ones_own(tmp_path: Path) -> None:
    def rate(more: str) -> float:
        text = SHORT.replace("smollm2", "Qwen2.5-3B") + more
        return training_of(load_config(at(tmp_path, "adder.yml", text)).config).learning_rate

    adapter = "trainer_adapters: {backend: {_type: insitu, lora: {alpha: 64}, backend: {base_model: a-3B}}}\n"
    assert rate("num_generations: 32\n") == 2e-4, "four times the batch, twice the rate"
    assert rate("training: {learning_rate: 1e-6}\n") == 1e-6
    assert rate("training: {method: sft}\n") == 5e-5
    assert rate(adapter) == 2e-5


def training_of(config: Config) -> StepSettings:
    [adapter] = config.trainer_adapters.values()
    assert isinstance(adapter, AdapterConfig)
    return adapter.training
