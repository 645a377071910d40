"""CurriculumState: how far the curriculum has come."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.harness.files.metrics import CurriculumFields


@dataclass(frozen=True, slots=True)
class CurriculumState:
    """The state of the curriculum after an epoch."""

    current_percentile: float
    last_expansion_epoch: int = -1
    total_groups: int = 0
    """Groups of the epoch with a training signal."""
    included_groups: int = 0
    """Groups of these within the percentile."""

    def to_dict(self) -> CurriculumFields:
        """Serialize for the journal and the metrics files."""
        return {
            "current_percentile": self.current_percentile,
            "last_expansion_epoch": self.last_expansion_epoch,
            "total_groups": self.total_groups,
            "included_groups": self.included_groups,
        }
