"""Files that load, and files that are refused with everything that is wrong in them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from insitu.config import dump_config, load_config
from insitu.errors import InvalidRequest

Write = Callable[[str], Path]


def refused(path: Path, *overrides: tuple[str, str]) -> str:
    with pytest.raises(InvalidRequest) as error:
        load_config(path, overrides)
    assert "sk-do-not-show" not in "".join(traceback.format_exception(error.value))
    return error.value.message


def test_a_whole_file(write: Write, basic: str) -> None:
    path = write(basic)
    loaded = load_config(path)
    config = loaded.config
    assert (loaded.path, loaded.directory) == (path, path.parent)
    assert config.llms["policy"].options == {"temperature": 0.4}
    assert config.llms["policy"].api_key.get_secret_value() == "sk-do-not-show"
    assert config.workflow is not None
    assert config.workflow.type_name == "test_agent"
    assert config.finetuning.target_functions == ["<workflow>"]
    assert config.eval.general.max_concurrency == 8
    assert loaded.source["workflow"] == {"_type": "test_agent", "llm": "policy"}
    assert "sk-do-not-show" not in repr(loaded)


def test_a_sparse_file_has_every_default(write: Write) -> None:
    config = load_config(write("finetuning: {}")).config
    assert config.finetuning.enabled is False
    assert config.finetuning.seed == 0
    assert config.finetuning.rollout_timeout_seconds == 600
    assert config.finetuning.run_configuration.result_json_path == "$"
    assert config.finetuning.curriculum_learning.initial_percentile == 0.3


def test_every_problem_is_listed_at_once(write: Write, basic: str) -> None:
    text = basic.replace("port: 7623", "port: no-number").replace("_type: test_reward", "_type: test_rewrad")
    text = text.replace("trainer: trainer\n", "trainer: trianer\n") + "  num_epoch: 3\n  seed: -1\n"
    message = refused(write(text))
    lines = message.splitlines()
    assert lines[0].endswith("config.yml: 5 problems")
    for wanted in (
        "eval.evaluators.reward._type: no evaluator has the _type `test_rewrad`; did you mean `test_reward`?",
        "trainer_adapters.adapter.backend.port: should be a valid integer, unable to parse string as an "
        "integer, not 'no-number'",
        "finetuning.num_epoch: unknown key; did you mean `num_epochs`?",
        "finetuning.seed: should be greater than or equal to 0, not -1",
        "finetuning.trainer: `trainers` has no entry `trianer`; did you mean `trainer`? (it has: trainer)",
    ):
        assert any(line.strip().startswith(wanted) for line in lines), (wanted, message)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("llms:", "lms:", "lms: unknown key; did you mean `llms`?"),
        ("model_name: tiny", "temprature: 1", "llms.policy.model_name: is missing"),
        ("_type: openai", "_type: nim", "llms.policy._type: should be 'openai', not 'nim'"),
        ("  llm: policy", "  lm: policy", "workflow.lm: unknown key; did you mean `llm`?"),
        ("_type: test_agent", "type: test_agent", "workflow._type: is missing; known: "),
        (
            "workflow:\n  _type: test_agent\n  llm: policy",
            "workflow: test_agent",
            "workflow: should be a mapping",
        ),
        (
            "port: 7623",
            "port: 7623, prot: 1",
            "trainer_adapters.adapter.backend.prot: unknown key; did you mean `port`?",
        ),
        ("port: 7623", "port: true", "trainer_adapters.adapter.backend.port: should be a number, not true"),
        ("ip: localhost, ", "", "trainer_adapters.adapter.backend.ip: is missing"),
        (
            "{_type: test_builder}",
            "{_type: test_builder, num_generations: 0}",
            "num_generations: should be greater",
        ),
        ("enabled: true", "enabled: perhaps", "finetuning.enabled: should be a valid boolean"),
        (
            "_type: test_reward",
            "_type: test_reward\n      tolerance: .nan",
            "reward.tolerance: should be a finite",
        ),
        (
            "_type: test_reward",
            "_type: test_reward\n      tolerance: 'inf'",
            "reward.tolerance: should be a finite",
        ),
        (
            "llm: policy",
            "llm: policy\n  args: {deep: [1, .inf]}",
            "workflow.args.deep.1: should be a finite number",
        ),
        (
            "enabled: true",
            "enabled: true\n  num_epochs: 0",
            "finetuning.num_epochs: should be greater than or equal",
        ),
        (
            "enabled: true",
            "enabled: true\n  num_epochs: 1.5",
            "finetuning.num_epochs: should be a valid integer",
        ),
        (
            "enabled: true",
            "enabled: true\n  early_stopping: {}",
            "finetuning.early_stopping.patience: is missing",
        ),
        ("ip: localhost", "ip: {}", "backend.ip: should be a valid string, not a mapping"),
        ("llm: policy", "llm: policy\n  args: {on: 1}", ": the key True should be a string"),
        ("finetuning:", "functions: []\nfinetuning:", "functions: should be a mapping, not a list"),
        ("enabled: true", "enabled: true\n  curriculum_learning: 3", "should be a mapping, not 3"),
        (
            "temperature: 0.4",
            "retry_on_status_codes: [{}]",
            "codes.0: should be a valid integer or should be a valid string, not a mapping",
        ),
        ("enabled: true", "enabled: true\n  target_functions: []", "finetuning.target_functions: "),
        ("temperature: 0.4", "temperature: hot", "llms.policy.temperature: should be a valid number"),
        (
            "model_name: tiny",
            "model_name: tiny\n    model: other",
            "`model_name` and `model` are the same setting",
        ),
        ("temperature: 0.4", "retry_on_status_codes: [418]", "only 408, 409, 429 and 5xx are retried"),
        ("temperature: 0.4", "retry_on_errors: [oops]", "not by message"),
        (
            "api_key: sk-do-not-show",
            "api_key: [sk-do-not-show]",
            "llms.policy.api_key: should be a valid string",
        ),
    ],
)
def test_what_is_refused(write: Write, basic: str, old: str, new: str, said: str) -> None:
    assert old in basic
    assert said in refused(write(basic.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("general", "said"),
    [
        ("max_concurrency: 0", "eval.general.max_concurrency: should be greater than or equal to 1, not 0"),
        ("profiler: {base_metrics: true}", "eval.general.profiler: has no effect here"),
        ("per_input_user_id: true", "eval.general.per_input_user_id: has no effect here"),
        ("output: {job_management: {max_jobs: 3}}", "eval.general.output.job_management: has no effect here"),
        ("output: {s3: {bucket: b}}", "eval.general.output.s3: has no effect here"),
        ("output: {dri: x}", "eval.general.output.dri: unknown key; did you mean `dir`?"),
    ],
)
def test_evaluation_settings_that_are_refused(write: Write, general: str, said: str) -> None:
    assert said in refused(write(f"eval:\n  general:\n    {general}\n"))


def test_evaluation_settings_that_ask_for_nothing_pass(write: Write) -> None:
    general = """
eval:
  general:
    output_dir: a
    output: {dir: b, cleanup: false, job_management: {max_jobs: 0, eviction_policy: created}}
    profiler: {base_metrics: false}
    per_input_user_id: false
    workflow_alias: alias
"""
    config = load_config(write(general)).config
    assert config.eval.general.results_dir == Path("b")
    assert config.eval.general.workflow_alias == "alias"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("trajectory_builder: builder", "trajectory_builder: bilder", "did you mean `builder`?"),
        (
            "trainer_adapter: adapter",
            "trainer_adapter: adaptor",
            "`trainer_adapters` has no entry `adaptor`; did you mean `adapter`? (it has: adapter)",
        ),
        (
            "{name: reward}",
            "{name: rewards}",
            "finetuning.reward_function.name: `eval.evaluators` has no entry",
        ),
        (
            "enabled: true",
            "enabled: true\n  target_model: polcy",
            "`llms` has no entry `polcy`; did you mean `policy`?",
        ),
    ],
)
def test_references(write: Write, basic: str, old: str, new: str, said: str) -> None:
    text = basic.replace(old, new, 1)
    assert said in refused(write(text))
    load_config(write(text.replace("enabled: true", "enabled: false")))


def test_references_are_checked_even_when_a_field_is_wrong(write: Write, basic: str) -> None:
    message = refused(write(basic.replace("name: reward", "name: rewards") + "  num_epochs: 0\n"))
    assert "finetuning.num_epochs" in message
    assert "no entry `rewards`" in message


def test_target_functions_need_not_exist(write: Write, basic: str) -> None:
    config = load_config(write(basic + "  target_functions: [labelled_at_run_time]\n")).config
    assert config.finetuning.target_functions == ["labelled_at_run_time"]


def test_no_secret_in_an_error(write: Write, basic: str) -> None:
    text = basic.replace("llm: policy", "llm: policy\n  headers: {Authorization: {x: sk-do-not-show}}")
    assert "workflow.headers.Authorization: should be a valid string" in refused(write(text))
    text = basic.replace("api_key: sk-do-not-show", "api_kee: sk-do-not-show\n    max_retries: x")
    assert "llms.policy.max_retries" in refused(write(text))


@pytest.mark.parametrize("written", ["1e-6", "1.0e-6", "'1e-6'", "0.000001"])
def test_numbers_as_people_write_them(write: Write, basic: str, written: str) -> None:
    text = basic.replace("_type: test_reward", f"_type: test_reward\n      tolerance: {written}")
    config = load_config(write(text.replace("temperature: 0.4", "min_p: 1e-2"))).config
    assert config.eval.evaluators["reward"].model_dump()["tolerance"] == 1e-6
    assert config.llms["policy"].options == {"min_p": 0.01}


def test_the_names_of_a_model_and_its_retries(write: Write) -> None:
    retries = "num_retries: 3, retry_on_status_codes: [429, 5xx], do_auto_retry: true"
    text = f"llms: {{a: {{_type: openai, model: tiny, seed: 0, top_k: 4, {retries}}}}}"
    llm = load_config(write(text)).config.llms["a"]
    assert (llm.model_name, llm.max_retries) == ("tiny", 3)
    assert llm.options == {"seed": 0, "top_k": 4}
    assert dump_config(load_config(write(text)).config)["llms"]["a"]["model_name"] == "tiny"


def test_a_missing_file_names_its_neighbour(write: Write) -> None:
    path = write("{}")
    message = refused(path.with_name("confg.yml"))
    assert "confg.yml: the file does not exist; did you mean `config.yml`?" in message
    assert "nor does the folder" in refused(path.parent / "no" / "config.yml")
    assert "is a directory" in refused(path.parent)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("# only a comment", "the file is empty"),
        ("- a\n- b", "holds a list, not a mapping"),
        ("hello", "holds the value 'hello', not a mapping"),
        ("llms:\n  a: [1, 2\nworkflow: x", "config.yml, line 3, column 9: not valid YAML"),
        ("llms:\n\ta: 1", "config.yml, line 2, column 1: not valid YAML"),
        ("a: 1\n---\nb: 2", "line 2, column 1: not valid YAML"),
        ("a: !!python/name:os.system", "line 1, column 4: not valid YAML"),
        ("llms: &a\n  x: *a", "line 1, column 7: not valid YAML: an anchor contains itself"),
        ("a: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("llms: {? [a, b] : 1}", "not valid YAML"),
    ],
)
def test_text_that_is_no_configuration(write: Write, text: str, said: str) -> None:
    assert said in refused(write(text))


def laughs(levels: int) -> str:
    lines = [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(["llms:", "  a0: &a0 {x: lol}", *lines])


@pytest.mark.parametrize(
    "text",
    [
        laughs(30),
        laughs(30).replace("[", "{<<: [").replace("]", "]}"),
        f"llms:\n  a: &a {'x' * 100_000}\n  b: [{', '.join(['*a'] * 1000)}]",
    ],
    ids=["lists", "merges", "text"],
)
def test_aliases_that_multiply_are_refused_before_they_are_expanded(write: Write, text: str) -> None:
    assert "aliases would expand" in refused(write(text))


def test_a_text_nested_without_end_is_refused(write: Write) -> None:
    assert "nested too deep" in refused(write("llms: " + "[" * 600 + "]" * 600))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_bytes(b"llms: \xff")
    assert "byte 6 is not UTF-8" in refused(path)


def test_repeated_keys_are_refused_with_their_lines(write: Write) -> None:
    message = refused(write("llms: {}\nfinetuning:\n  seed: 1\n  num_epochs: 2\n  seed: 3\nllms: {}\n"))
    assert "line 6: `llms`, already on line 1" in message
    assert "line 5: `seed`, already on line 3" in message


def test_a_key_repeated_in_one_line(write: Write) -> None:
    assert "line 1: `seed`" in refused(write("finetuning: {seed: 1, seed: 2}"))


def test_a_merged_mapping_may_be_overridden(write: Write) -> None:
    text = "llms:\n  a: &a {_type: openai, model: x, seed: 1}\n  b: {<<: *a, seed: 2}\n"
    assert load_config(write(text)).config.llms["b"].options == {"seed": 2}


def test_an_ending_that_says_nothing_about_the_policy_gets_no_reward(write: Write, basic: str) -> None:
    message = refused(write(basic + "  ending_rewards: {infrastructure: 0}\n"))
    assert message.splitlines()[1:] == [
        "  finetuning.ending_rewards: infrastructure cannot have a reward here, because it says nothing "
        "about the policy; context_overflow, step_limit and timeout can"
    ]
