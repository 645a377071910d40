// The figures of committed steps, as the charts take them. Pure functions.

import type { JsonObject, Step } from "../wire";

/** The phases of a step on the backend, in order; `StepRunner` measures them. */
const PHASES = ["collect", "teacher", "drain", "train", "checkpoint", "publish", "probe"];
/** Reasons for which uploaded rollouts are not trained on; `account/…` counts them. */
const REASONS = ["zero_variance", "truncated", "stale", "constrained", "below_min_reward", "not_in_pair"];

export interface StepFigures {
  step: number;
  reward: { mean: number; low: number; high: number } | null;
  /** Uploaded rollouts: `trained`, and the reasons of the others. */
  fates: Record<string, number>;
  /** By phase, in order. */
  seconds: Record<string, number>;
  metrics: JsonObject;
}

/** A metric, or null if the step has none of this name. */
export function metric(step: { metrics: JsonObject }, name: string): number | null {
  const value = step.metrics[name];
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

export function figuresOf(step: Step): StepFigures {
  const read = (name: string) => metric(step, name);
  const mean = read("reward/mean");
  const std = read("reward/std") ?? 0;
  const reward = mean === null ? null : { mean, low: Math.max(read("reward/min") ?? -Infinity, mean - std), high: Math.min(read("reward/max") ?? Infinity, mean + std) };
  const fates: Record<string, number> = {};
  for (const name of ["trained", ...REASONS]) {
    const value = read(`account/${name}`);
    if (value) fates[name] = value;
  }
  const seconds: Record<string, number> = {};
  for (const name of PHASES) {
    const value = read(`time/${name}_seconds`);
    if (value) seconds[name] = value;
  }
  return { step: step.step, reward, fates, seconds, metrics: step.metrics };
}

/** Every fate of the steps, `trained` first, then by the reasons' order. */
export function fatesOf(steps: readonly StepFigures[]): string[] {
  return ["trained", ...REASONS].filter((name) => steps.some((step) => step.fates[name]));
}
