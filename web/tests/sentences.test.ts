import { describe, expect, it } from "vitest";

import { address } from "../src/api";
import { pause } from "../src/live";
import { defaults } from "../src/pages/Compare";
import { contentText, toolCalls } from "../src/parts/Message";
import { fatesSentence, phaseSentence, rewardSentence, whereTheyWent } from "../src/summary";
import type { RunView, StepPoint, Store } from "../src/wire";
import { share, storeLabel, verdictSentence, verdictTone } from "../src/words";

const point = (mean: number | null, fates: Record<string, number>, seconds: Record<string, number> = {}): StepPoint =>
  ({ reward: mean === null ? null : { mean }, fates, seconds }) as unknown as StepPoint;
const view = (points: StepPoint[], validations: unknown[] = []): RunView => ({ points, validations }) as unknown as RunView;

describe("the sentences under the pictures", () => {
  it("say what the reward did, and that nothing was validated", () => {
    expect(rewardSentence(view([point(0.1, {}), point(0.5, {})]))).toBe("Training reward went from 0.1 to 0.5. Nothing was validated: a rise on training examples alone may be luck or memory.");
    expect(rewardSentence(view([point(null, {})], [{ gain: null }]))).toBe("No step has a reward yet.");
    expect(rewardSentence(view([point(0.1, {})], [{ gain: { difference: 0.3, low: 0.1, high: 0.5, confidence: 0.95 } }]))).toContain("+0.30, 95 % interval +0.10 to +0.50");
  });
  it("say where rollouts went", () => {
    expect(fatesSentence(view([point(0, { trained: 25, zero_variance: 75 })]))).toBe("In the last step 25 % of the rollouts taught something; 75 % were not used: no spread in the group.");
    expect(fatesSentence(view([]))).toContain("No rollout");
    expect(whereTheyWent([point(0, { a: 1 }), point(0, { b: 3 })]).map((entry) => entry.name)).toEqual(["b", "a"]);
  });
  it("name the bottleneck", () => {
    expect(phaseSentence(point(0, {}, { rollouts: 8, train: 2 }))).toBe("10 s in all, 80 % of it rollouts: sampling is the bottleneck; training beside it would gain at most 1.3 ×.");
    expect(phaseSentence(point(0, {}))).toBe("No times are known for this step.");
  });
});

describe("words", () => {
  it("name files of rollouts", () => {
    const store = { name: "epoch-0000", label: "step 1", kind: "training" as const, epoch: 0, step_of_epoch: 0, position: 0, policy_step: 0, num_rollouts: 1, num_groups: 1 };
    expect(["epoch-0000", "<b>"].map((name) => storeLabel([store], name))).toEqual(["step 1", "<b>"]);
  });
  it("have a colour for a reason that nobody has heard of", () => {
    expect(share("brand_new")).toEqual({ key: "brand_new", label: "brand new", fill: "f-other" });
    expect(verdictTone("learning", true)).toBe("warn");
    expect(verdictTone("falling", false)).toBe("bad");
  });
});

describe("messages", () => {
  it("are text whatever their shape", () => {
    expect(contentText([{ type: "text", text: "a" }, "b", { type: "image_url" }])).toBe('a\nb\n{"type":"image_url"}');
    expect(toolCalls({ tool_calls: [{ function: { name: "add", arguments: '{"a":1}' } }, { function: { arguments: "{broken" } }, 7] })).toEqual([
      { name: "add", given: '{\n  "a": 1\n}' },
      { name: "tool", given: "{broken" },
    ]);
    expect(toolCalls({ tool_calls: "no list" })).toEqual([]);
  });
});

describe("requests", () => {
  it("keep names inside their part of the address", () => {
    expect(address(["runs", "a/../b?c"], { text: "x&y", cursor: null })).toBe("view/v1/runs/a%2F..%2Fb%3Fc?text=x%26y");
  });
  it("wait longer after each failure, but not for ever", () => {
    expect([0, 1, 2, 50].map(pause)).toEqual([500, 1000, 2000, 15_000]);
  });
  it("compare validations if there are two", () => {
    const store = (name: string, kind: Store["kind"]): Store => ({ name, kind }) as Store;
    expect(defaults([store("a", "training"), store("b", "training"), store("v", "validation")])).toEqual({ before: "a", after: "b" });
    expect(defaults([store("a", "training"), store("v", "validation"), store("w", "validation")])).toEqual({ before: "v", after: "w" });
    expect(defaults([store("a", "training")])).toBeNull();
  });
});

describe("the verdict", () => {
  it("is not said twice", () => {
    expect(verdictSentence({ code: "not_learning", sentence: "not learning: mean reward 0.1" })).toBe("Mean reward 0.1");
    expect(verdictSentence({ code: "too_early", sentence: "too early to tell after 4 steps" })).toBe("After 4 steps");
    expect(verdictSentence({ code: "falling", sentence: "getting worse: mean reward 0.1" })).toBe("Mean reward 0.1");
    expect(verdictSentence({ code: "learning", sentence: "The reward rises." })).toBe("The reward rises.");
  });
});
