import { describe, expect, it } from "vitest";

import { fatesOf, figuresOf, metric } from "../src/backend/figures";

const step = (number: number, metrics: Record<string, unknown>) => figuresOf({ step: number, metrics } as never);

describe("figures of a committed step", () => {
  it("has a reward with its spread, within what was seen", () => {
    expect(step(1, { "reward/mean": 0.9, "reward/std": 0.3, "reward/min": 0, "reward/max": 1 }).reward).toEqual({ mean: 0.9, low: 0.6000000000000001, high: 1 });
    expect(step(1, { "reward/mean": 0.5 }).reward).toEqual({ mean: 0.5, low: 0.5, high: 0.5 });
    expect(step(1, { "reward/mean": null }).reward).toBeNull();
  });
  it("counts rollouts by reason and seconds by phase, in their order", () => {
    const made = step(2, { "account/stale": 1, "account/zero_variance": 2, "account/trained": 5, "account/groups": 4, "account/truncated": 0, "time/probe_seconds": 1, "time/train_seconds": 3, "time/step_seconds": 4 });
    expect(made.fates).toEqual({ trained: 5, zero_variance: 2, stale: 1 });
    expect(Object.keys(made.seconds)).toEqual(["train", "probe"]);
    expect(fatesOf([made, step(3, { "account/constrained": 1 })])).toEqual(["trained", "zero_variance", "stale", "constrained"]);
  });
  it("takes nothing but numbers", () => {
    expect(metric({ metrics: { entropy: "<img>", loss: 1 } }, "entropy")).toBeNull();
    expect(metric({ metrics: {} }, "loss")).toBeNull();
  });
});
