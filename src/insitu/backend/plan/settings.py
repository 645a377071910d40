"""The settings of `insitu serve`: one frozen value, checked before anything starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from insitu.access import engine_door
from insitu.backend.plan.compute import Compute, Placement
from insitu.backend.plan.devices.machine import Machine
from insitu.backend.plan.engine import (
    NO_PARSER,
    Device,
    Dtype,
    EngineSettings,
    Publication,
    allowed_lora_rank,
)
from insitu.backend.plan.layouts import Wanted, check_four_bits
from insitu.backend.plan.teachers import TeacherSettings, unknown_teacher
from insitu.errors import CannotHonour
from insitu.system.drain import STOP_SECONDS
from insitu.system.keys import check_key
from insitu.system.tls import TlsFiles, check_listener
from insitu.wire.engine import MAX_LORAS

PROBE_THRESHOLDS: dict[Dtype, float] = {"float32": 0.005, "float16": 0.05, "bfloat16": 0.25}
"""Mean |Δlogprob| of engine and trainer: float32 agrees to 1e-4, float16 to 0.01, bfloat16 rounds weights."""


MOST_GATEWAYS = 64


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The supervisor's timeouts, in seconds."""

    engine_start: float = 600.0
    trainer_start: float = 600.0
    step: float = 3600.0
    score: float = 300.0
    publish: float = 600.0
    """For the trainer to open, save or export a version, and for an engine to load it."""
    handover: float = 120.0
    """For an engine to sleep or wake up, and for the trainer to come onto the devices or leave them."""
    engine_silent: float = 60.0
    """For an engine to answer; one that is alive but silent is killed and started again."""
    drain: float = 300.0
    hold: float = 3600.0
    gateway_push: float = 60.0
    stop_grace: float = STOP_SECONDS


def option_of(deadline: str) -> str:
    """Return the option of `insitu serve` that sets a deadline."""
    return f"--{deadline.replace('_', '-')}-seconds"


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """One backend: what it serves, on which devices, and where it keeps its state."""

    state_dir: Path
    device: Device
    compute: Compute
    publication: Publication
    placement: Placement
    api_key: str = field(repr=False)
    model: str | None = None
    model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 7623
    gateway_port: int = 8000
    num_gateways: int = 1
    """Processes at consecutive ports; a rollout's calls all go to one of them."""
    allowed_hosts: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    behind_proxy: bool = False
    """A proxy in front of API and gateway terminates TLS."""
    num_replicas: int = 1
    num_ranks: int = 1
    ray_address: str | None = None
    max_seq_length: int = 2048
    max_num_seqs: int = 64
    max_lora_rank: int = 16
    """Of runs that are open side by side."""
    max_loras: int = MAX_LORAS
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    """The engine's share of a GPU; None leaves it to vLLM."""
    micro_batch_tokens: int | None = None
    """Tokens that a trainer rank computes at once; None uses the trainer's default."""
    checkpoint_layers: bool | None = None
    """Compute layers again in the backward pass instead of keeping them; None: as it is planned, else not."""
    kept_tokens: int = 0
    """Micro-batches of up to so many tokens keep their layers, also where they are checkpointed."""
    four_bit_base: bool = False
    machine: Machine | None = None
    """The GPUs to plan for; None on a CPU."""
    wanted: Wanted | None = None
    """On CUDA the user's own settings, which bind the planner."""
    enforce_eager: bool = True
    tool_call_parser: str | None = None
    """vLLM's name; None: chosen by the model, as far as it is known; `NO_PARSER`: none."""
    reasoning_parser: str | None = None
    """Likewise."""
    lora_modules: tuple[str, ...] | None = None
    """The layers of the model that adapters may sit on; None: its family is not known."""
    hybrid: bool = False
    """True if layers of the model keep a state instead of keys and values."""
    probe_threshold: float | None = None
    """Mean |Δlogprob| between sampler and trainer that fails a step; None uses the precision's default."""
    keep_checkpoints: int = 3
    keep_calls_seconds: float | None = None
    """Delete recorded calls that are older; None: keep them for ever."""
    teachers: tuple[TeacherSettings, ...] = ()
    database_url: str | None = field(default=None, repr=False)
    """PostgreSQL for the ledger and the recorded calls; None for SQLite in the state directory."""
    engine_key: str = field(default_factory=engine_door.new_key, repr=False)
    """Opens the engines' own endpoints to supervisor and gateway; another one at every start."""
    deadlines: Deadlines = field(default_factory=Deadlines)

    def check(self) -> None:
        """Reject weak keys, plain HTTP beyond loopback, and values out of range."""
        check_key(self.api_key, self.host)
        check_listener(self.host, self.tls, behind_proxy=self.behind_proxy)
        if self.keep_checkpoints < 2:
            raise CannotHonour(f"--keep-checkpoints {self.keep_checkpoints}: at least 2 are kept")
        if self.num_replicas < 1 or self.num_ranks < 1:
            raise CannotHonour("--replicas and --trainer-ranks are at least 1")
        self._check_gateways()
        for name, seconds in asdict(self.deadlines).items():
            if not seconds > 0:
                raise CannotHonour(f"{option_of(name)} {seconds:g}: a deadline is above 0 seconds")
        if self.four_bit_base:
            check_four_bits(self.publication, self.num_ranks)
        if self.device == "cpu":
            self._check_cpu()

    @property
    def gateway_ports(self) -> range:
        """The port of each gateway."""
        return range(self.gateway_port, self.gateway_port + self.num_gateways)

    def _check_gateways(self) -> None:
        if not 1 <= self.num_gateways <= MOST_GATEWAYS:
            raise CannotHonour(f"--gateways {self.num_gateways}: it is 1 to {MOST_GATEWAYS}")
        if self.num_gateways > 1 and self.port in self.gateway_ports:
            last = self.gateway_ports[-1]
            raise CannotHonour(
                f"--port {self.port} is among the gateways' ports {self.gateway_port} to {last}",
                hint="choose another --gateway-port",
            )

    def _check_cpu(self) -> None:
        """Reject settings that only a GPU honours."""
        asked = {
            "--tensor-parallel-size": self.tensor_parallel_size if self.tensor_parallel_size > 1 else None,
            "--gpu-memory-utilization": self.gpu_memory_utilization,
        }
        for name, value in asked.items():
            if value is not None:
                raise CannotHonour(
                    f"{name} {value} cannot be honoured: this backend runs on a CPU", hint=f"remove {name}"
                )

    def teacher(self, name: str) -> TeacherSettings:
        """Return a teacher by its name, or raise CannotHonour."""
        for teacher in self.teachers:
            if teacher.name == name:
                return teacher
        raise unknown_teacher(name, [teacher.name for teacher in self.teachers])

    def preloaded(self) -> EngineSettings | None:
        """Return the engine of `--model`; its default name is the directory's last part or the hub id."""
        if self.model is None:
            return None
        own_name = Path(self.model).name if Path(self.model).is_dir() else self.model
        return self.engine(self.model, self.model_name or own_name)

    def engine(self, model: str, served_name: str) -> EngineSettings:
        """Return the engine settings before any registration's overrides."""
        return EngineSettings(
            model=model,
            served_name=served_name,
            device=self.device,
            dtype=self.dtype,
            publication=self.publication,
            sleep=self.device == "cuda" and self.placement == "shared",
            max_model_len=self.max_seq_length,
            max_num_seqs=self.max_num_seqs,
            max_lora_rank=allowed_lora_rank(self.max_lora_rank),
            max_loras=self.max_loras,
            lora_modules=self.lora_modules,
            hybrid=self.hybrid,
            tensor_parallel_size=self.tensor_parallel_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enforce_eager=self.enforce_eager,
            block_size=self.compute.block_size,
            tool_call_parser=None if self.tool_call_parser == NO_PARSER else self.tool_call_parser,
            reasoning_parser=None if self.reasoning_parser == NO_PARSER else self.reasoning_parser,
        )

    @property
    def dtype(self) -> Dtype:
        """The precision of the engine, the published weights and the trainer."""
        return self.compute.dtype

    @property
    def runs_dir(self) -> Path:
        return self.state_dir / "runs"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"

    @property
    def threshold(self) -> float:
        """The probe's tolerance."""
        return PROBE_THRESHOLDS[self.dtype] if self.probe_threshold is None else self.probe_threshold
