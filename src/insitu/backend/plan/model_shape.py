"""Read what the memory planner needs to know about a model from its `config.json`, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from insitu.errors import CannotHonour, NotFound
from insitu.system.torch_builds.installing import install_command

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Values of `model_type` whose weights are counted exactly; SmolLM2 is a llama."""

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class CannotPlan(CannotHonour):
    """The planner does not know this model, so the user sets the figures."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder: everything that memory depends on."""

    name: str
    family: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """True if the output head is the embedding."""
    max_positions: int
    dtype: str
    """The precision of the checkpoint."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The width of one layer's keys; its values are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's linear modules, which adapters target."""
        return (
            (self.hidden, self.query_size),
            (self.hidden, self.kv_size),
            (self.hidden, self.kv_size),
            (self.query_size, self.hidden),
            (self.hidden, self.intermediate),
            (self.hidden, self.intermediate),
            (self.intermediate, self.hidden),
        )

    @property
    def linear_parameters(self) -> int:
        """Weights of one layer's linear modules, without biases."""
        return sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def layer_parameters(self) -> int:
        biases = self.qkv_bias * (self.query_size + 2 * self.kv_size) + self.out_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        norms = 2 * self.hidden + (2 * self.head_dim if self.family == "qwen3" else 0)
        return self.linear_parameters + biases + norms

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: embedding, last norm and, unless tied, the output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.layer_parameters + self.outer_parameters

    def lora_parameters(self, rank: int) -> int:
        """Parameters of one adapter on all linear modules of all layers."""
        return self.num_layers * rank * sum(inputs + outputs for inputs, outputs in self.linears)


class _Config(BaseModel):
    """The fields of `config.json` that count; the others are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model_type: str
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    tie_word_embeddings: bool | None = None
    max_position_embeddings: PositiveInt
    dtype: str | None = Field(None, validation_alias=AliasChoices("dtype", "torch_dtype"))
    attention_bias: bool = False
    mlp_bias: bool = False


class Kind(BaseModel):
    """The fields that tell whether the architecture is known at all."""

    model_config = ConfigDict(extra="ignore")

    model_type: str | None = None
    quantization_config: object = None


_TIED_BY_DEFAULT = ("smollm3",)
"""Families whose head is tied if the file does not say; Transformers' own defaults."""


def parse_shape(name: str, text: str | bytes) -> ModelShape:
    """Turn the text of a `config.json` into a shape; say so if the architecture is unknown."""
    try:
        kind = Kind.model_validate_json(text)
    except ValidationError as error:
        raise CannotPlan(f"the config.json of {name} is not readable: {_first(error)}") from error
    if kind.model_type not in FAMILIES:
        raise _unknown(
            name, f"its model_type is {kind.model_type!r}; known: {', '.join(FAMILIES)} (SmolLM2 is a llama)"
        )
    if kind.quantization_config is not None:
        raise _unknown(name, "its weights are quantized")
    try:
        config = _Config.model_validate_json(text)
    except ValidationError as error:
        raise _unknown(name, f"its config.json lacks a figure ({_first(error)})") from error
    family = config.model_type
    tied = config.tie_word_embeddings
    return ModelShape(
        name=name,
        family=family,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        tied=family in _TIED_BY_DEFAULT if tied is None else tied,
        max_positions=config.max_position_embeddings,
        dtype=config.dtype or "float32",
        qkv_bias=family == "qwen2" or (family != "mistral" and config.attention_bias),
        out_bias=family in ("llama", "qwen3", "smollm3") and config.attention_bias,
        mlp_bias=family in ("llama", "smollm3") and config.mlp_bias,
    )


def read_shape(model: str) -> ModelShape:
    """Read the shape of a model directory, or of a hub id: only its `config.json` is downloaded."""
    folder = files_of(model, ("config.json",))
    try:
        return parse_shape(model, (folder / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"{model} has no config.json", hint="give the directory of a model") from error


def read_kind(model: str) -> Kind:
    """Return a model's kind; without a readable `config.json` it has no family."""
    try:
        return Kind.model_validate_json((files_of(model, ("config.json",)) / "config.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return Kind()


def files_of(model: str, names: Sequence[str]) -> Path:
    """Return a model's directory; of a hub id, one with these files, as far as the model has them."""
    return Path(model) if Path(model).is_dir() else _from_hub(model, names)


def bytes_per_parameter(dtype: str) -> int:
    return _BYTES[dtype]


def _from_hub(model: str, names: Sequence[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType] - its own stubs
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise CannotPlan(
            f"{model} is not a directory, and huggingface_hub, which would download it, is missing",
            hint=f"give the model's directory, or: {install_command('huggingface_hub')}",
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=list(names)))
    except HFValidationError as error:
        raise NotFound(
            f"{model} is neither a directory here, in {Path.cwd()}, nor a name on the hub",
            hint="give the directory of a model, or its name on the hub: owner/model",
        ) from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise NotFound(
            f"{model} is not a directory, and the hub did not provide its {names[0]}: {error}",
            hint=f"check the name, or download it first: hf download {model}",
        ) from error


def _unknown(name: str, why: str) -> CannotPlan:
    return CannotPlan(
        f"the memory of {name} cannot be planned: {why}",
        hint="on CUDA give --max-seq-length, --micro-batch-tokens and --gpu-memory-utilization yourself",
    )


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(str(part) for part in problem['loc']) or 'file'}: {problem['msg']}"
