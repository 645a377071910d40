"""The overview of a run: a point per step, validations, and its place among the runs."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from insitu.harness.files.metrics import StepLine, ValidationEntry, VerdictFields
from insitu.harness.files.run_directory import JOURNAL_FILE, epoch_name
from insitu.harness.gains.gain import Gain
from insitu.harness.rollouts.capture import Capture
from insitu.harness.rollouts.fields import members
from insitu.harness.verdicts.verdict import needs_change
from insitu.view.answers.alarms import alarms_of
from insitu.view.answers.groups import one_step
from insitu.view.answers.spreads import spread_of
from insitu.view.reading.run_files import RunFiles, validation_store
from insitu.view.run import ViewedRun
from insitu.wire.views.runs import (
    ConfigView,
    GainView,
    RunSummary,
    RunView,
    Spread,
    StepPoint,
    StoreView,
    ValidationPoint,
    VerdictView,
)

_NORMAL_95 = 1.96
TRAINED = "trained"
_ROLLOUTS = "rollouts"
_WHOLE_STEP = "step"


@dataclass(frozen=True, slots=True)
class _Rollouts:
    """Figures over the rollouts of one file."""

    rewards: Sequence[float]
    lengths: Sequence[int]
    seconds: float | None
    """From the start of the first to the end of the last."""


def summary(run: ViewedRun, *, indexed: float = 1.0) -> RunSummary:
    """Return a run in short, from its files alone."""
    return run.with_files(lambda files: _summary(run, files, indexed))


def run_view(run: ViewedRun) -> RunView:
    """Return everything that the first page of a run shows."""
    progress = run.use()
    stores = run.index.read(_stores)
    points = step_points(run)
    names = {store.name for store in stores}
    validations, journal, labels = run.with_files(
        lambda files: (files.validations(), files.journal(), files.labels())
    )
    totals = Counter[str]()
    for point in points:
        totals.update(point.fates)
    reasons = sorted(totals, key=lambda name: (name != TRAINED, -totals[name], name))
    phases = dict.fromkeys(phase for point in points for phase in point.seconds)
    best = [record.get("step") for record in journal if record.get("event") == "best"]
    positions = {point.store: point.position for point in points}
    return RunView(
        run=summary(run, indexed=progress.share),
        points=points,
        validations=[_validation(entry, names) for entry in validations],
        best_step=best[-1] if best and isinstance(best[-1], int) else None,
        alarms=[alarm for alarm in alarms_of(run).alarms if alarm.active],
        reasons=reasons,
        phases=list(phases),
        stores=[_placed(store, positions, labels) for store in stores],
        texts=run.names.view(),
        cursor=f"{len(journal)}-{progress.num_rollouts}",
    )


def step_points(run: ViewedRun, start: int = 0, stop: int | None = None) -> list[StepPoint]:
    """Return the points of the steps from the `start`-th up to the `stop`-th, which is left out."""
    lines, numbers, stores = run.with_files(
        lambda files: (files.steps()[start:stop], files.step_numbers()[start:stop], set(files.stores()))
    )
    names = [_store_of(line, stores) for line in lines]
    figures = run.index.read(lambda db: {name: _figures(db, name) for name in dict.fromkeys(names)})
    return [
        _point(start + place, number, line, name, figures[name])
        for place, (number, line, name) in enumerate(zip(numbers, lines, names, strict=True))
    ]


def config_view(run: ViewedRun) -> ConfigView:
    """Return the configuration of a run."""
    return ConfigView(run.files.config, run.files.fingerprint)


def verdict_view(verdict: VerdictFields | None) -> VerdictView | None:
    """Return a verdict as pages show it."""
    if verdict is None:
        return None
    return VerdictView(verdict["code"], list(verdict["causes"]), verdict["sentence"], needs_change(verdict))


def gain_view(gain: Gain, before: str, after: str) -> GainView:
    """Return a paired difference with its sentence."""
    fields = gain.to_dict()
    return GainView(
        difference=fields["difference"],
        low=fields["low"],
        high=fields["high"],
        confidence=fields["confidence"],
        num_examples=fields["num_examples"],
        num_unpaired=fields["num_unpaired"],
        verdict=fields["verdict"],
        sentence=gain.sentence(before, after),
    )


def _summary(run: ViewedRun, files: RunFiles, indexed: float) -> RunSummary:
    lines, validations = files.steps(), files.validations()
    last = lines[-1] if lines else None
    state, outcome, failure = files.state()
    known = run.num_indexed
    settings = files.settings
    measured = [entry for entry in validations if not entry.get("remeasured")]
    return RunSummary(
        key=run.key,
        run_id=files.run_id,
        name=str(files.backend.get("name") or ""),
        path=str(files.path),
        base_model=str(files.backend.get("base_model") or ""),
        method="" if settings is None else settings.method,
        state=state,
        outcome=outcome,
        failure=failure,
        started_at=files.started_at,
        updated_at=_updated_at(files),
        num_epochs=files.num_epochs(),
        num_steps=len(lines),
        step=max((line.get("step") or 0 for line in lines), default=0),
        num_rollouts=sum(_total(line) for line in lines) if known is None else known,
        indexed=indexed,
        reward=None if last is None else last.get("avg_reward"),
        validation=measured[-1]["avg_reward"] if measured else None,
        verdict=None if last is None else verdict_view(last.get("verdict")),
        problems=[*files.problems(), *([] if known is None else run.index.problems())],
    )


def _total(line: StepLine) -> int:
    return line["account"]["total"]


def _updated_at(files: RunFiles) -> float | None:
    latest = [files.path / JOURNAL_FILE, *list(files.stores().values())[-3:]]
    return max((path.stat().st_mtime for path in latest if path.exists()), default=None)


def _store_of(line: StepLine, stores: set[str]) -> str:
    name = epoch_name(line["epoch"], line.get("step_of_epoch", 0))
    return name if name in stores else epoch_name(line["epoch"])


def _figures(db: sqlite3.Connection, store: str) -> _Rollouts:
    rows: Sequence[tuple[float | None, int, float | None, float | None]] = db.execute(
        "SELECT reward, num_output_tokens, started_at, seconds FROM rollouts "
        "WHERE store = (SELECT id FROM stores WHERE name = ?)",
        (store,),
    ).fetchall()
    starts = [start for _, _, start, _ in rows if start is not None]
    ends = [start + (seconds or 0.0) for _, _, start, seconds in rows if start is not None]
    return _Rollouts(
        [reward for reward, _, _, _ in rows if reward is not None],
        [length for _, length, _, _ in rows],
        max(ends) - min(starts) if starts else None,
    )


def _point(position: int, number: int, line: StepLine, store: str, rollouts: _Rollouts) -> StepPoint:
    metrics = {name: value for name, value in (line.get("training") or {}).items() if value is not None}
    account = line["account"]
    # While the index is read, a step has some of its rollouts, and figures from those would mislead.
    whole = len(rollouts.lengths) >= line["num_trajectories"]
    seconds = _seconds(metrics, rollouts.seconds) if whole else {}
    sampled = sum(rollouts.lengths)
    return StepPoint(
        position=position,
        number=number,
        epoch=line["epoch"],
        step_of_epoch=line.get("step_of_epoch", 0),
        step=line.get("step"),
        store=store,
        at=unix_time(line.get("timestamp")),
        reward=spread_of(rollouts.rewards) if whole else _reward_of(line),
        reward_selected=line.get("filtered_avg_reward"),
        fates={TRAINED: account["trained"], **account["dropped"]},
        endings=account["endings"],
        num_rollouts=_total(line),
        num_groups=line.get("num_groups", 0),
        num_truncated=line.get("num_truncated"),
        lengths=spread_of(rollouts.lengths) if whole else None,
        calls=_calls(account.get("calls")),
        entropy=metrics.get("entropy"),
        kl=metrics.get("kl/reference", metrics.get("kl/teacher")),
        mismatch=metrics.get("mismatch/kl"),
        loss=metrics.get("loss", metrics.get("loss/total")),
        grad_norm=metrics.get("grad_norm"),
        learning_rate=metrics.get("learning_rate"),
        seconds=seconds,
        tokens_per_second=sampled / rollouts.seconds if whole and rollouts.seconds else None,
        metrics=metrics,
        verdict=verdict_view(line.get("verdict")),
    )


def _reward_of(line: StepLine) -> Spread | None:
    """Return the rewards of a step as its own line has them, which knows no quantiles."""
    mean, low, high = line["avg_reward"], line["min_reward"], line["max_reward"]
    if mean is None or low is None or high is None:
        return None
    return Spread(
        mean, line.get("reward_std") or 0.0, low, None, None, None, high, line.get("num_rewarded", 0)
    )


def _seconds(metrics: Mapping[str, float], collecting: float | None) -> dict[str, float]:
    found = {} if collecting is None else {_ROLLOUTS: collecting}
    for name, value in metrics.items():
        phase = name.removeprefix("time/").removesuffix("_seconds")
        if name == f"time/{phase}_seconds" and phase != _WHOLE_STEP:
            found[phase] = value
    return found


def _calls(written: object) -> dict[str, int]:
    if written is None:
        return {}
    calls = Capture.from_dict(members(written))
    return {
        "seen": calls.total,
        TRAINED: calls.trained,
        "context_only": sum(calls.context_only.values()),
        "dropped": sum(calls.dropped.values()),
    }


def _validation(entry: ValidationEntry, stores: set[str]) -> ValidationPoint:
    at, mean, error = unix_time(entry.get("timestamp")), entry["avg_reward"], entry.get("standard_error")
    name = validation_store(entry)
    margin = None if mean is None or error is None else _NORMAL_95 * error
    gain = entry.get("gain")
    return ValidationPoint(
        epoch=entry["epoch"],
        step=entry["step"],
        store=name if name in stores else None,
        at=at,
        reward=mean,
        low=None if mean is None or margin is None else mean - margin,
        high=None if mean is None or margin is None else mean + margin,
        standard_error=error,
        num_examples=entry["num_examples"],
        num_samples=entry.get("num_samples", 1),
        num_failed=entry["num_failed"],
        remeasured=entry.get("remeasured", False),
        gain=None if gain is None else gain_view(Gain.from_dict(gain), "step 0", f"step {entry['step']}"),
    )


def _stores(db: sqlite3.Connection) -> list[StoreView]:
    rows = db.execute(
        "SELECT s.name, s.kind, s.epoch, s.step_of_epoch, count(*), count(DISTINCT r.position), "
        "min(nullif(r.policy_steps, '[]')), max(nullif(r.policy_steps, '[]')) "
        "FROM stores s JOIN rollouts r ON r.store = s.id "
        "GROUP BY s.id ORDER BY s.seq, s.id"
    ).fetchall()
    return [
        StoreView(name, "", kind, epoch, step, None, one_step(first, last), count, groups)
        for name, kind, epoch, step, count, groups, first, last in rows
    ]


def _placed(store: StoreView, positions: Mapping[str, int], labels: Mapping[str, str]) -> StoreView:
    position = positions.get(store.name) if store.kind == "training" else None
    return replace(store, label=labels.get(store.name, store.name), position=position)


def unix_time(text: str | None) -> float | None:
    """Read a timestamp of the metrics files."""
    return None if text is None else datetime.fromisoformat(text).timestamp()
