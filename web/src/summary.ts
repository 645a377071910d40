// The sentences under the pictures of a run. Pure functions.

import { figure, percent, seconds, signed } from "./format";
import type { RunView, StepPoint } from "./wire";
import { fateLabel } from "./words";

const RECENT = 5;
/** Beside a larger share of sampling, training at the same time would gain next to nothing. */
const WORTH_SAYING = 0.95;

/** From the mean rewards of the steps that have one. */
export function trainingSentence(means: readonly number[]): string {
  const last = means[means.length - 1];
  if (last === undefined) return "No step has a reward yet.";
  return means.length > 1 ? `Training reward went from ${figure(means[0])} to ${figure(last)}.` : `Training reward is ${figure(last)} after one step.`;
}

export function rewardSentence(view: RunView): string {
  const parts = [trainingSentence(view.points.flatMap((point) => (point.reward === null ? [] : [point.reward.mean])))];
  const gain = [...view.validations].reverse().find((point) => point.gain !== null)?.gain;
  if (gain) {
    const range = gain.low !== null && gain.high !== null ? `, ${Math.round(gain.confidence * 100)} % interval ${signed(gain.low)} to ${signed(gain.high)}` : "";
    parts.push(`Held out, the gain on the same examples is ${signed(gain.difference)}${range}.`);
  } else if (view.validations.length === 0) parts.push("Nothing was validated: a rise on training examples alone may be luck or memory.");
  return parts.join(" ");
}

/** Shares of where the rollouts of these steps went, the largest first. */
export function whereTheyWent(points: readonly Pick<StepPoint, "fates">[]): { name: string; share: number }[] {
  const sums = new Map<string, number>();
  let total = 0;
  for (const point of points) {
    for (const [name, value] of Object.entries(point.fates)) {
      sums.set(name, (sums.get(name) ?? 0) + value);
      total += value;
    }
  }
  if (total === 0) return [];
  return [...sums].map(([name, value]) => ({ name, share: value / total })).sort((a, b) => b.share - a.share);
}

export function fatesSentence(view: { points: readonly Pick<StepPoint, "fates">[] }): string {
  const recent = view.points.slice(-RECENT);
  const shares = whereTheyWent(recent);
  if (shares.length === 0) return "No rollout of a finished step is recorded yet.";
  const trained = shares.find((entry) => entry.name === "trained")?.share ?? 0;
  const other = shares.find((entry) => entry.name !== "trained" && entry.share > 0);
  const steps = recent.length === 1 ? "In the last step" : `In the last ${recent.length} steps`;
  return `${steps} ${percent(trained)} of the rollouts taught something${other ? `; ${percent(other.share)} were not used: ${fateLabel(other.name)}` : ""}.`;
}

/** The seconds of all phases of a step; null if none was recorded. */
export function totalSeconds(point: Pick<StepPoint, "seconds">): number | null {
  const times = Object.values(point.seconds);
  return times.length ? times.reduce((sum, value) => sum + value, 0) : null;
}

export function phaseSentence(point: Pick<StepPoint, "seconds">): string {
  const entries = Object.entries(point.seconds);
  const total = totalSeconds(point) ?? 0;
  const longest = [...entries].sort((a, b) => b[1] - a[1])[0];
  if (!longest || total <= 0) return "No times are known for this step.";
  const rollouts = (point.seconds["rollouts"] ?? 0) / total;
  const meaning =
    longest[0] === "rollouts"
      ? `sampling is the bottleneck${rollouts < WORTH_SAYING ? `; training beside it would gain at most ${figure(1 / rollouts, 2)} ×` : ""}`
      : `${longest[0]} is the longest phase`;
  return `${seconds(total)} in all, ${percent(longest[1] / total)} of it ${longest[0]}: ${meaning}.`;
}
