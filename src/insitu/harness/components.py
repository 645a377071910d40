"""The components of this room: importing this module registers them.

The `openpipe_art_…` names are the original harness's, so that its configurations select these parts.
"""

from __future__ import annotations

from insitu.harness.backend_adapter import BackendAdapter
from insitu.harness.collect.demonstration_builder import DemonstrationBuilder
from insitu.harness.collect.group_builder import GroupBuilder
from insitu.harness.collect.pair_builder import PairBuilder
from insitu.harness.collect.recorded_builder import RecordedBuilder
from insitu.harness.interfaces.settings import (
    AdapterConfig,
    BuilderConfig,
    DemonstrationsConfig,
    PreferencePairsConfig,
    RecordedRolloutsConfig,
    TrainerConfig,
)
from insitu.harness.loop.epoch_trainer import EpochTrainer
from insitu.harness.sinks.langfuse_sink import LangfuseConfig, LangfuseSink
from insitu.harness.sinks.mlflow_sink import MlflowConfig, MlflowSink
from insitu.harness.sinks.opentelemetry_sink import OpentelemetryConfig, OpentelemetrySink
from insitu.harness.sinks.tensorboard_sink import TensorboardConfig, TensorboardSink
from insitu.harness.sinks.trackio_sink import TrackioConfig, TrackioSink
from insitu.harness.sinks.wandb_sink import WandbConfig, WandbSink
from insitu.plugins import Kind, register

for _name in ("insitu", "openpipe_art_traj_builder"):
    register(Kind.TRAJECTORY_BUILDER, _name, BuilderConfig)(GroupBuilder)
register(Kind.TRAJECTORY_BUILDER, "demonstrations", DemonstrationsConfig)(DemonstrationBuilder)
register(Kind.TRAJECTORY_BUILDER, "preference_pairs", PreferencePairsConfig)(PairBuilder)
register(Kind.TRAJECTORY_BUILDER, "recorded_rollouts", RecordedRolloutsConfig)(RecordedBuilder)
for _name in ("insitu", "openpipe_art_trainer_adapter"):
    register(Kind.TRAINER_ADAPTER, _name, AdapterConfig)(BackendAdapter)
for _name in ("insitu", "openpipe_art_trainer"):
    register(Kind.TRAINER, _name, TrainerConfig)(EpochTrainer)
register(Kind.SINK, "langfuse", LangfuseConfig)(LangfuseSink)
register(Kind.SINK, "opentelemetry", OpentelemetryConfig)(OpentelemetrySink)
register(Kind.SINK, "mlflow", MlflowConfig)(MlflowSink)
register(Kind.SINK, "tensorboard", TensorboardConfig)(TensorboardSink)
register(Kind.SINK, "trackio", TrackioConfig)(TrackioSink)
register(Kind.SINK, "wandb", WandbConfig)(WandbSink)
