"""The ledger: what runs, groups, jobs, steps and checkpoints exist, durable before anyone is told."""

from insitu.backend.ledger.ledger import Ledger, ledger_url
from insitu.backend.ledger.rows import Checkpoint, Event, GroupRecord, Job, Run, Step

__all__ = ["Checkpoint", "Event", "GroupRecord", "Job", "Ledger", "Run", "Step", "ledger_url"]
