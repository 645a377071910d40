"""The ledger of runs, groups, jobs, steps and checkpoints: every write is durable before it is confirmed."""

from insitu.backend.ledger.ledger import Ledger, ledger_url
from insitu.backend.ledger.rows import Checkpoint, Event, GroupRecord, Job, Run, Step

__all__ = ["Checkpoint", "Event", "GroupRecord", "Job", "Ledger", "Run", "Step", "ledger_url"]
