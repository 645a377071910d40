"""Keys that the original harness (NeMo Agent Toolkit 1.9.0) knows, by place in its file.

It rejects unknown keys in the sections of `STRICT` and silently ignores them elsewhere.
"""

from __future__ import annotations

from insitu.config.values.problems import Location

_TYPED = frozenset({"_type", "type"})
_COMPONENT = _TYPED | {"reward"}
_MAPS = frozenset({"llms", "functions", "trajectory_builders", "trainer_adapters", "trainers"})

KNOWN: dict[str, frozenset[str]] = {
    "eval": frozenset({"general", "evaluators"}),
    "eval.general": frozenset(
        [
            "max_concurrency",
            "workflow_alias",
            "output_dir",
            "output",
            "dataset",
            "profiler",
            "validate_llm_endpoints",
            "per_input_user_id",
        ]
    ),
    "eval.general.output": frozenset(
        [
            "dir",
            "remote_dir",
            "custom_pre_eval_process_function",
            "custom_scripts",
            "s3",
            "cleanup",
            "job_management",
            "workflow_output_step_filter",
            "write_atif_workflow_output",
        ]
    ),
    "trajectory_builders.*": _COMPONENT | {"num_generations"},
    "trainer_adapters.*": _COMPONENT | {"backend", "training"},
    "trainer_adapters.*.backend": frozenset(
        [
            "ip",
            "port",
            "name",
            "project",
            "base_model",
            "api_key",
            "delete_old_checkpoints",
            "init_args",
            "engine_args",
            "server_config",
        ]
    ),
    "trainers.*": _COMPONENT,
    "finetuning": frozenset(
        [
            "enabled",
            "trainer",
            "trajectory_builder",
            "trainer_adapter",
            "reward_function",
            "target_functions",
            "target_model",
            "curriculum_learning",
            "num_epochs",
            "output_dir",
            "run_configuration",
        ]
    ),
    "finetuning.reward_function": frozenset({"name"}),
    "finetuning.curriculum_learning": frozenset(
        [
            "enabled",
            "initial_percentile",
            "increment_percentile",
            "expansion_interval",
            "min_reward_diff",
            "sort_ascending",
            "random_subsample",
        ]
    ),
}
"""Places whose keys are all known; nothing is claimed about others."""

STRICT = frozenset(
    {"", "general", "eval.general.dataset", "eval.general.dataset.structure", "eval.general.dataset.filter"}
)

IGNORED = frozenset({"trainer_adapters.*.training", "finetuning.run_configuration"})
"""Places that the original reads but never uses."""

DEFAULT_LEARNING_RATE = "5e-5"

WHY_DROPPED: dict[str, str] = {
    "general": "front end, telemetry and logging belong to the toolkit",
    "optimizer": "belongs to `nat optimize`, not to training",
    "function_groups": "your function creates its own tools",
    "middleware": "your function creates its own tools",
    "embedders": "your function creates its own embedder",
    "retrievers": "your function creates its own retriever",
    "memory": "your function creates its own memory",
    "object_stores": "your function creates its own store",
    "authentication": "your function keeps its own credentials",
    "ttc_strategies": "test-time strategies are part of your function here",
    "base": "insitu reads one file; nothing is inherited",
    "eval.general.validate_llm_endpoints": "insitu always checks that the gateway serves the run",
    "eval.general.output.custom_pre_eval_process_function": "evaluators see the output as it is",
    "eval.general.output.write_atif_workflow_output": "every rollout is kept in trajectories/*.jsonl",
    "eval.general.dataset.s3": "datasets are local files",
    "eval.general.dataset.remote_file_path": "datasets are local files",
    "trajectory_builders.*.reward": "the toolkit itself overrides it with finetuning.reward_function",
    "trainer_adapters.*.reward": "the toolkit itself overrides it with finetuning.reward_function",
    "trainers.*.reward": "the toolkit itself overrides it with finetuning.reward_function",
}

LLM_KEYS: dict[str, str] = {
    "optimizable_params": "belongs to `nat optimize`; here every key is sent with the call",
    "search_space": "belongs to `nat optimize`; here every key is sent with the call",
    "verify_ssl": "certificates are always verified here",
    "thinking": "the toolkit turned it into a system prompt; write that into your prompt",
    "api_type": "your function chooses the protocol; the gateway speaks all of them",
}
"""Keys of `llms.X` meant for the toolkit, not for the model."""

HAND_SECTIONS = frozenset(
    [
        "function_groups",
        "middleware",
        "embedders",
        "retrievers",
        "memory",
        "object_stores",
        "ttc_strategies",
        "base",
    ]
)
"""Left-out sections that the workflow may need."""

LLM_TYPES: dict[str, tuple[str, str]] = {
    "nim": ("https://integrate.api.nvidia.com/v1", "${NVIDIA_API_KEY}"),
    "dynamo": ("http://HOST:8000/v1", "${API_KEY:-none}"),
    "azure_openai": ("https://RESOURCE.openai.azure.com/openai/v1", "${AZURE_OPENAI_API_KEY}"),
    "litellm": ("http://HOST:4000/v1", "${LITELLM_API_KEY}"),
}
"""Providers that speak the OpenAI protocol: address and key to write."""

EVALUATORS: dict[str, str] = {
    "ragas": "llm_judge",
    "trajectory": "llm_judge",
    "tunable_rag_evaluator": "llm_judge",
    "langsmith_judge": "llm_judge",
}
"""The original's judges, each with the closest evaluator here."""

AGENTS = frozenset(
    {
        "auto_memory_agent",
        "chat_completion",
        "per_user_react_agent",
        "react_agent",
        "reasoning_agent",
        "responses_api_agent",
        "rewoo_agent",
        "router_agent",
        "tool_calling_agent",
    }
)
"""Workflows that come with the toolkit."""

DPO_PREFIXES = ("dpo_", "nemo_customizer")
"""The original's other way to train, through an NVIDIA service."""


def place_of(location: Location) -> str:
    """Replace names that the user chose with `*`: `llms.policy.seed` → `llms.*.seed`."""
    parts = [str(part) for part in location]
    if len(parts) > 1 and parts[0] in _MAPS:
        parts[1] = "*"
    elif len(parts) > 2 and parts[:2] == ["eval", "evaluators"]:
        parts[2] = "*"
    return ".".join(parts)


def knows(location: Location) -> bool:
    """Return True if the original has a field of that name at that place."""
    return place_of(location) in WHY_DROPPED or location[-1] in KNOWN.get(
        place_of(location[:-1]), frozenset()
    )
