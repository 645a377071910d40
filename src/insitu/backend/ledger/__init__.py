"""The ledger of runs, jobs, steps, checkpoints and what is served: a write is durable once confirmed."""

from insitu.backend.ledger.ledger import Ledger, ledger_url
from insitu.backend.ledger.rows import Checkpoint, Event, GroupRecord, Job, Lease, Promotion, Run, Step

__all__ = [
    "Checkpoint",
    "Event",
    "GroupRecord",
    "Job",
    "Lease",
    "Ledger",
    "Promotion",
    "Run",
    "Step",
    "ledger_url",
]
