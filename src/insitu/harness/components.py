"""The components of this room: importing this module registers them.

The `openpipe_art_…` names are the original harness's, so that its configurations select these parts.
"""

from __future__ import annotations

from insitu.harness.backend_adapter import BackendAdapter
from insitu.harness.collect.group_builder import GroupBuilder
from insitu.harness.interfaces.settings import AdapterConfig, BuilderConfig, TrainerConfig
from insitu.harness.loop.epoch_trainer import EpochTrainer
from insitu.plugins import Kind, register

for _name in ("insitu", "openpipe_art_traj_builder"):
    register(Kind.TRAJECTORY_BUILDER, _name, BuilderConfig)(GroupBuilder)
for _name in ("insitu", "openpipe_art_trainer_adapter"):
    register(Kind.TRAINER_ADAPTER, _name, AdapterConfig)(BackendAdapter)
for _name in ("insitu", "openpipe_art_trainer"):
    register(Kind.TRAINER, _name, TrainerConfig)(EpochTrainer)
