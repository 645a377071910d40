"""The ledger of runs, groups, jobs, steps, checkpoints and leases: a write is durable once confirmed."""

from insitu.backend.ledger.ledger import Ledger, ledger_url
from insitu.backend.ledger.rows import Checkpoint, Event, GroupRecord, Job, Lease, Run, Step

__all__ = ["Checkpoint", "Event", "GroupRecord", "Job", "Lease", "Ledger", "Run", "Step", "ledger_url"]
