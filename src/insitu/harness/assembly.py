"""Assembly: builds the components of a configuration, each once, and closes them in reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from insitu.config.config import Config
from insitu.config.llms import LLMConfig
from insitu.config.load import LoadedConfig, load_config
from insitu.config.values.problems import dotted
from insitu.datasets.dataset import Dataset
from insitu.datasets.dataset_config import DatasetConfig, StructureConfig, dataset_config
from insitu.datasets.example import Example
from insitu.errors import DeadlineExceeded, InvalidRequest
from insitu.harness.gains.clusters import read_clusters
from insitu.harness.interfaces.run import Agent, Task
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.plugins import ComponentConfig, Kind, build, find, nearest
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.system.threads import run_in_daemon_thread
from insitu.workflow.binding import LLMBinding, gateway_root, is_among
from insitu.workflow.llm import LLMSettings
from insitu.workflow.workflow import Workflow

_LOAD_SECONDS = 600.0


class Assembly:
    """The `Parts` that components are built from. Use it as `async with Assembly(...) as parts`."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.config: Config = loaded.config
        self.directory: Path = loaded.directory
        self._setting = loaded.setting
        self._stack = AsyncExitStack()
        self._evaluators: dict[str, Evaluator | GroupEvaluator] = {}
        self._being_built: list[str] = []
        self.notes: list[str] = []
        """Remarks from the datasets for the user."""
        self.built: list[tuple[Kind, ComponentConfig]] = []
        """Every component, in the order in which they were built."""
        self.validation_parts: Assembly | None = None
        """The parts of `--validation_config_file`, once the validation task is built."""

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def llm(self, name: str) -> LLMSettings:
        """Return an entry of `llms` as configured."""
        return LLMBinding(self.config.llms, frozenset(), "", "", "").settings(name, None, None)

    async def component(self, kind: Kind, config: ComponentConfig) -> Any:
        """Build a component that is closed together with the assembly."""
        component = find(kind, config.type_name)
        self.built.append((kind, config))
        return await self._stack.enter_async_context(build(component, config, self))

    async def evaluator(self, name: str) -> Evaluator | GroupEvaluator:
        """Return an entry of `eval.evaluators`, built once; reject circular dependencies."""
        if name in self._evaluators:
            return self._evaluators[name]
        known = self.config.eval.evaluators
        if name not in known:
            raise InvalidRequest(f"eval.evaluators has no `{name}`{nearest(name, known)}")
        if name in self._being_built:
            raise InvalidRequest(f"evaluators need each other: {' → '.join([*self._being_built, name])}")
        self._being_built.append(name)
        try:
            self._evaluators[name] = await self.component(Kind.EVALUATOR, known[name])
        finally:
            self._being_built.pop()
        return self._evaluators[name]

    async def adapter(self) -> TrainerAdapter:
        """Build the adapter, which knows the model in training and its backend, and locate the gateway."""
        name = self.config.finetuning.trainer_adapter
        if name is None or name not in self.config.trainer_adapters:
            raise InvalidRequest(
                "finetuning.trainer_adapter names no entry of `trainer_adapters`, so it is not known which "
                "model of `llms` is trained, and by which backend",
                hint="use the configuration that `insitu finetune` takes",
            )
        config = self.config.trainer_adapters[name]
        adapter = cast(TrainerAdapter, await self.component(Kind.TRAINER_ADAPTER, config))
        await adapter.locate()
        return adapter

    async def agent(self, model: TrainedModel) -> Agent:
        """Build the workflow and its functions, and bind the models that both may call."""
        config = self._workflow_config()
        workflow = cast(Workflow, await self.component(Kind.WORKFLOW, config))
        functions = {
            name: (cast(Workflow, await self.component(Kind.WORKFLOW, function)), function)
            for name, function in self.config.functions.items()
        }
        return Agent(workflow, config, functions, bind_llms(self.config, model, self._setting))

    async def examples(self, config: ComponentConfig | None, where: str) -> list[Example]:
        """Load the examples of a dataset."""
        if config is None:
            raise InvalidRequest(
                f"{where} is missing", hint="name a dataset there or as `data: train.json`, or use --dataset"
            )
        dataset = cast(Dataset, await self.component(Kind.DATASET, config))
        try:
            async with asyncio.timeout(_LOAD_SECONDS):
                examples = await run_in_daemon_thread(dataset.load)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{where}: the dataset was not loaded within {_LOAD_SECONDS:.0f} s",
                hint="look at its function, or write its rows to a file",
            ) from None
        self.notes += [f"{where}: {note}" for note in dataset.notes]
        return examples

    async def training_task(
        self, model: TrainedModel, own: Sequence[Example] | None = None, *, whole_rows: bool = False
    ) -> Task:
        """Build the training task, with a builder's `own` examples if it has any.

        With `whole_rows`, the dataset needs no columns of `structure`.
        """
        if own is not None:
            return Task(await self.agent(model), own, await self.reward())
        examples = await self.training_examples(whole_rows=whole_rows)
        return Task(await self.agent(model), examples, await self.reward())

    async def training_examples(self, *, whole_rows: bool = False) -> list[Example]:
        """Load the training examples; with `whole_rows`, no column of `structure` is needed."""
        config, given = self.config.eval.general.dataset, self.config.finetuning.run_configuration.dataset
        if given is not None:
            config = dataset_config(given, config)
        if whole_rows and isinstance(config, DatasetConfig):
            config = config.model_copy(update={"structure": StructureConfig(disable=True)})
        return await self.examples(config, "eval.general.dataset")

    async def validation_task(self, training: Task, model: TrainedModel) -> Task | None:
        """Build the validation task, with its own temperature; return None without a validation dataset."""
        task = await self._validation_task(training, model)
        temperature = self.config.finetuning.run_configuration.validation_temperature
        if task is not None:
            read_clusters(task.examples, self.config.eval.general.cluster_key)  # rejects a key that rows lack
        if task is None or temperature is None:
            return task
        return task.with_binding(at_temperature(task.agent.binding, temperature))

    async def _validation_task(self, training: Task, model: TrainedModel) -> Task | None:
        options = self.config.finetuning.run_configuration
        if options.validation_config_file is not None:
            other = await self._stack.enter_async_context(
                Assembly(load_config(Path(options.validation_config_file)))
            )
            self.validation_parts = other
            return await other.as_validation_of(self, model)
        if options.validation_dataset is None:
            return None
        config = dataset_config(options.validation_dataset, self.config.eval.general.dataset)
        examples = await self.examples(config, "--validation_dataset")
        return Task(training.agent, examples, training.evaluator)

    async def evaluation_task(self, model: TrainedModel) -> Task:
        """Build the validation task without the training examples."""
        training = Task(await self.agent(model), (), await self.reward())
        task = await self.validation_task(training, model)
        if task is None:
            raise InvalidRequest(
                "there is no validation dataset",
                hint="set finetuning.run_configuration.validation_dataset, or use --validation_dataset",
            )
        return task

    async def as_validation_of(self, training: Assembly, model: TrainedModel) -> Task:
        """Build a task from this configuration's workflow, reward and dataset, with the model in training."""
        given = training.config.finetuning.run_configuration.validation_dataset
        config = self.config.eval.general.dataset
        if given is not None:
            config = dataset_config(given, config)
        examples = await self.examples(config, "eval.general.dataset of --validation_config_file")
        reward = training.config.finetuning.reward_function
        assert reward is not None
        return Task(await self.agent(model), examples, await self.evaluator(reward.name))

    async def reward(self) -> Evaluator | GroupEvaluator:
        """Return the evaluator that `finetuning.reward_function` names."""
        reward = self.config.finetuning.reward_function
        if reward is None:
            raise InvalidRequest("finetuning.reward_function is missing", hint="name one of eval.evaluators")
        return await self.evaluator(reward.name)

    def _workflow_config(self) -> ComponentConfig:
        options = self.config.finetuning.run_configuration
        if options.endpoint is not None:
            fields = {
                "_type": "http",
                "url": options.endpoint,
                "timeout_seconds": options.endpoint_timeout,
                "result_json_path": options.result_json_path,
            }
            return find(Kind.WORKFLOW, "http").config.model_validate(fields)
        if self.config.workflow is None:
            raise InvalidRequest(
                "`workflow` is missing",
                hint="name your agent there or as `agent: module:function`, or use --endpoint",
            )
        return self.config.workflow


def at_temperature(binding: LLMBinding, temperature: float) -> LLMBinding:
    """Return the binding with another temperature of the trained model."""
    llms = dict(binding.llms)
    for name in binding.trained:
        entry = llms[name]
        assert isinstance(entry, LLMConfig)
        llms[name] = entry.model_copy(update={"temperature": temperature})
    return replace(binding, llms=llms)


def outside_binding(binding: LLMBinding, base_url: str, model: str, api_key: str) -> LLMBinding:
    """Return the binding with a model of another server in place of the trained one; nothing is recorded."""
    llms = dict(binding.llms)
    for name in binding.trained:
        entry = llms[name]
        assert isinstance(entry, LLMConfig)
        llms[name] = entry.model_copy(update={"base_url": base_url})
    return replace(binding, llms=llms, model=model, api_key=api_key, recorded=False)


def bind_llms(
    config: Config, model: TrainedModel, setting: Callable[..., str] = lambda *location: dotted(location)
) -> LLMBinding:
    """Determine which entries of `llms` are the model being trained, and where it is served.

    `setting` names a location as the file does.
    """
    target = config.finetuning.target_model
    names = [target] if target is not None else list(config.llms)
    trained = [name for name in names if config.llms[name].model_name in (model.name, model.base_model)]
    if not trained:
        listed = ", ".join(f"llms.{name}: {config.llms[name].model_name}" for name in names) or "none"
        raise InvalidRequest(
            f"no model in `llms` is the one being trained: the run {model.name!r} trains "
            f"{model.base_model!r}, the configuration has {listed}",
            hint=f"set model_name of the agent's entry in `llms` to {model.base_model!r}",
        )
    # Next to a target chosen by name, calls of such an entry would be indistinguishable from trained ones.
    also = [name for name, llm in config.llms.items() if llm.model_name == model.name and name not in trained]
    if also:
        raise InvalidRequest(
            f"finetuning.target_model is {target!r}, but llms.{also[0]} calls the run {model.name!r} too: "
            "which of the two made a call could not be told",
            hint=f"set model_name of llms.{also[0]} to {model.base_model!r} for the untrained model, or "
            "choose what is trained by finetuning.target_functions instead",
        )
    roots = {gateway_root(url) for name in trained if (url := config.llms[name].base_url) is not None}
    if len(roots) > 1:
        raise InvalidRequest(
            f"the trained entries of `llms` have several addresses: {', '.join(sorted(roots))}",
            hint="they all must be the backend's gateway; use finetuning.target_model to pick one",
        )
    addressed = next((name for name in trained if config.llms[name].base_url is not None), trained[0])
    own_key = config.llms[trained[0]].api_key.get_secret_value()
    adapter = config.finetuning.trainer_adapter or "<name>"
    given = roots.pop() if roots else model.gateway_url
    every = [given]
    if is_among(given, model.gateway_urls):
        every = [given if is_among(given, [url]) else url for url in model.gateway_urls]
    return LLMBinding(
        config.llms,
        frozenset(trained),
        model.name,
        every[0],
        own_key or model.api_key,
        further_gateways=tuple(every[1:]),
        address_setting=setting("llms", addressed, "base_url"),
        address_given=config.llms[addressed].base_url is not None,
        key_setting=setting("llms", trained[0], "api_key")
        if own_key
        else setting("trainer_adapters", adapter, "backend", "api_key"),
    )
