"""Contracts: what every component must do, as pytest suites that a plugin runs against itself.

    from insitu.testing.contracts import EvaluatorContract

    class TestMyReward(EvaluatorContract):
        def make(self):
            return MyReward()

`docs/plugins.md` says what each suite asks for.
"""

from insitu.testing.contracts.contract import Contract
from insitu.testing.contracts.dataset import DatasetContract
from insitu.testing.contracts.evaluator import EvaluatorContract, GroupEvaluatorContract
from insitu.testing.contracts.trainer import TrainerContract
from insitu.testing.contracts.trainer_adapter import TrainerAdapterContract
from insitu.testing.contracts.trajectory_builder import TrajectoryBuilderContract
from insitu.testing.contracts.workflow import WorkflowContract

__all__ = [
    "Contract",
    "DatasetContract",
    "EvaluatorContract",
    "GroupEvaluatorContract",
    "TrainerAdapterContract",
    "TrainerContract",
    "TrajectoryBuilderContract",
    "WorkflowContract",
]
