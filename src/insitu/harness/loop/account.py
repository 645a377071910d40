"""Account: the fate of every rollout of a step or an epoch, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from insitu.harness.files.metrics import AccountFields
from insitu.harness.loop.curriculum import REASONS, ZERO_VARIANCE, Selection, usable_reward
from insitu.harness.rollouts.capture import Capture, CaptureMismatch, add_up
from insitu.harness.rollouts.episode import Trajectory
from insitu.types import SCORED, Ending

BACKEND_REASONS = (ZERO_VARIANCE, "truncated", "stale", "constrained", "below_min_reward", "not_in_pair")
"""Reasons for which a backend drops a submitted rollout."""


@dataclass(frozen=True, slots=True)
class Account:
    """Rollouts by outcome: `trained` plus all of `dropped` equals `total`."""

    total: int
    trained: int
    truncated: int
    """Trained rollouts that were cut off at the token limit."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """By reason: `insitu.harness.loop.curriculum.REASONS`, and after training `BACKEND_REASONS`."""
    endings: dict[str, int] = field(default_factory=dict[str, int])
    """Failed rollouts without a reward, by ending."""
    rewarded_endings: dict[str, int] = field(default_factory=dict[str, int])
    """Failed rollouts with the reward of their ending, which count in their groups."""
    refilled: int = 0
    """Groups that were rolled out in place of groups whose rewards are all equal."""
    calls: Capture | None = None
    """Their model calls; None in files of earlier releases."""
    calls_confirmed: bool | None = None
    """True if the backend counted the calls too; None before training."""

    def line(self) -> str:
        """Format as ``trained 34/64 (4 truncated): 18 zero-variance, 8 failed; calls 96 seen = …``."""
        text = self._rollouts()
        if self.rewarded_endings:
            text += f"; failed with a reward: {_listed(sorted(self.rewarded_endings.items()))}"
        if self.refilled:
            text += f"; {self.refilled} group{'' if self.refilled == 1 else 's'} refilled"
        if self.calls is None:
            return text
        unsure = " (the backend does not count calls)" if self.calls_confirmed is False else ""
        return f"{text}; {self.calls.line()}{unsure}"

    def _rollouts(self) -> str:
        text = f"trained {self.trained}/{self.total}"
        if self.truncated:
            text += f" ({self.truncated} truncated)"
        order = (*REASONS, *BACKEND_REASONS)  # a reason in both sorts by its first place
        reasons = sorted(self.dropped.items(), key=lambda item: (-item[1], order.index(item[0])))
        return f"{text}: {_listed(reasons)}" if reasons else text

    def after_training(self, metrics: Mapping[str, float]) -> Account:
        """Move the rollouts that the backend's step metrics report as dropped from `trained` to `dropped`.

        Raises CaptureMismatch when the backend's count of calls differs from ours.
        """
        dropped = {reason: int(metrics.get(f"account/{reason}", 0)) for reason in BACKEND_REASONS}
        dropped = {reason: count for reason, count in dropped.items() if count}
        calls = self.calls.after_training(metrics) if self.calls else None
        return replace(
            self,
            trained=self.trained - sum(dropped.values()),
            # A rollout that overflowed may be dropped as truncated too, and is not counted here.
            truncated=max(0, self.truncated - dropped.get("truncated", 0)),
            dropped=dict(Counter(self.dropped) + Counter(dropped)),
            calls=calls or self.calls,
            calls_confirmed=calls is not None if self.calls else None,
        )

    def to_dict(self) -> AccountFields:
        """Serialize for the metrics files; `from_dict` reads it back."""
        return {
            "total": self.total,
            "trained": self.trained,
            "truncated": self.truncated,
            "dropped": self.dropped,
            "endings": self.endings,
            "rewarded_endings": self.rewarded_endings,
            "refilled": self.refilled,
            "calls": self.calls.to_dict() if self.calls else None,
            "calls_confirmed": self.calls_confirmed,
            "line": self.line(),
        }

    @staticmethod
    def from_dict(fields: AccountFields) -> Account:
        """Read back the result of `to_dict`, also that of an earlier release."""
        calls = fields.get("calls")
        return Account(
            total=fields["total"],
            trained=fields["trained"],
            truncated=fields["truncated"],
            dropped=fields["dropped"],
            endings=fields["endings"],
            rewarded_endings=fields.get("rewarded_endings", {}),
            refilled=fields.get("refilled", 0),
            calls=None if calls is None else Capture.from_dict(calls),
            calls_confirmed=fields.get("calls_confirmed"),
        )


def sum_accounts(accounts: Sequence[Account]) -> Account:
    """Sum the accounts of an epoch's steps."""
    dropped, endings, rewarded = Counter[str](), Counter[str](), Counter[str]()
    for account in accounts:
        rewarded.update(account.rewarded_endings)
        dropped.update(account.dropped)
        endings.update(account.endings)
    calls = [account.calls for account in accounts if account.calls is not None]
    confirmed = [each.calls_confirmed for each in accounts if each.calls_confirmed is not None]
    return Account(
        total=sum(account.total for account in accounts),
        trained=sum(account.trained for account in accounts),
        truncated=sum(account.truncated for account in accounts),
        dropped=dict(dropped),
        endings=dict(endings),
        rewarded_endings=dict(rewarded),
        refilled=sum(account.refilled for account in accounts),
        calls=add_up(calls) if calls else None,
        calls_confirmed=all(confirmed) if confirmed else None,
    )


def make_account(groups: Sequence[Sequence[Trajectory]], selection: Selection, refilled: int = 0) -> Account:
    """Compare the collected groups with the selection. Raises CaptureMismatch when calls are missing."""
    trained = [trajectory for group in selection.groups for trajectory in group]
    failed = [t for group in groups for t in group if usable_reward(t) is None]
    rewarded = [t for group in groups for t in group if t.failed and usable_reward(t) is not None]
    return Account(
        total=sum(map(len, groups)),
        trained=len(trained),
        truncated=sum(t.ending is Ending.LENGTH for t in trained),
        dropped=dict(selection.dropped),
        endings=dict(Counter(_ending(t) for t in failed)),
        rewarded_endings=dict(Counter(t.ending.value for t in rewarded)),
        refilled=refilled,
        calls=_calls(groups, selection),
    )


def _calls(groups: Sequence[Sequence[Trajectory]], selection: Selection) -> Capture:
    """Count selected rollouts' calls as trained; drop the others' calls for their rollout's reason."""
    selected = {t.rollout_id: len(t.call_ids) for group in selection.groups for t in group}

    def capture(trajectory: Trajectory) -> Capture:
        found = trajectory.capture
        if trajectory.rollout_id in selected:
            return replace(found, trained=selected[trajectory.rollout_id])
        # Neither selected nor dropped: its calls are not counted anywhere, so the sum will not balance.
        reason = selection.reasons.get(trajectory.rollout_id)
        return replace(found, trained=0) if reason is None else found.without_training(reason)

    calls = add_up(capture(trajectory) for group in groups for trajectory in group)
    if not calls.balanced:
        nowhere = [
            t.rollout_id
            for group in groups
            for t in group
            if t.rollout_id not in selected and t.rollout_id not in selection.reasons
        ]
        raise CaptureMismatch(
            f"{calls.line()}: that is {calls.accounted} of {calls.total}; rollouts that are neither selected "
            f"nor dropped for a reason: {', '.join(nowhere[:5]) or 'none'}",
            hint="look at the rollouts' `metadata.capture` in trajectories/ and at the trainer's selection",
        )
    return calls


def _listed(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {name.replace('_', '-')}" for name, count in counts)


def _ending(trajectory: Trajectory) -> str:
    # A rollout that ran to the end but has no usable reward failed in scoring.
    if trajectory.ending in SCORED:
        return Ending.EVALUATOR_ERROR.value
    return trajectory.ending.value
