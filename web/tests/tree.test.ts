import { describe, expect, it } from "vitest";

import { tokensOfCall } from "../src/calls";
import { drawn, endingAt, firstDifference, forksOf, grown, placeOf, policyPlaces, shortened, siblingsThrough, tokensOf } from "../src/tree";
import type { CallView, ResampledFork, RolloutRow, TreeNode, TreeSpan, TreeView } from "../src/wire";

const span = (length: number, more: Partial<TreeSpan> = {}): TreeSpan => ({
  length,
  kind: "sampled",
  num_sampled: 1,
  num_trained: 1,
  advantage_sum: 0.5,
  reasons: [],
  policy_steps: [3],
  logprobs: Array.from({ length }, (_, index) => -index),
  ...more,
});

const node = (id: number, ids: number[], children: number[], depth: number, branches: number[], spans = [span(ids.length)]): TreeNode => ({
  id,
  parent: null,
  children,
  depth,
  ids,
  texts: ids.map(String),
  spans,
  branches,
});

// Prompt 8 8, then "1 0", then siblings 0 and 1 go on, 2 ends there.
const tree: TreeView = {
  siblings: [0, 1, 2].map((generation) => ({ generation }) as RolloutRow),
  advantages: [null, null, null],
  nodes: [
    node(0, [8, 8, 1, 0], [1, 2], 0, [0, 1, 2], [span(2, { kind: "context", num_trained: 0, advantage_sum: null, logprobs: null, policy_steps: [] }), span(2, { policy_steps: [3, 4] })]),
    node(1, [5, 9], [], 4, [0]),
    node(2, [7], [], 4, [1], [span(1, { num_trained: 0, advantage_sum: null, reasons: ["truncated"] })]),
  ],
  branches: [0, 1, 2].map((sibling) => ({ sibling, sequence: 0, node: [1, 2, 0][sibling] as number, num_tokens: 4, call_ids: [] })),
  num_prompt_tokens: 2,
  prompt: [],
  basis: "trainer_function",
  without_tokens: [],
};

describe("the tree", () => {
  it("is drawn parents first, children in their order", () => {
    expect(drawn(tree.nodes).map((entry) => entry.id)).toEqual([0, 1, 2]);
  });

  it("ends on a circle and on a child that is not there", () => {
    expect(drawn([node(0, [1], [0, 7], 0, [])]).map((entry) => entry.id)).toEqual([0]);
    expect(drawn([])).toEqual([]);
  });

  it("gives every token the figures of its span", () => {
    const tokens = tokensOf(tree.nodes[0] as TreeNode, 3, policyPlaces([4, 3, 3]));
    expect(tokens.map((token) => token.use)).toEqual(["context", "context", "trained", "trained"]);
    expect(tokens.map((token) => token.logprob)).toEqual([null, null, -0, -1]);
    expect(tokens.map((token) => token.advantage)).toEqual([null, null, 0.5, 0.5]);
    expect(tokens.map((token) => token.version)).toEqual([null, null, 1, 1]);
    const dropped = tokensOf(tree.nodes[2] as TreeNode, 1, new Map())[0];
    expect([dropped?.use, dropped?.reason]).toEqual(["dropped", "truncated"]);
  });

  it("shows ids where the texts are not known", () => {
    const bare = { ...(tree.nodes[1] as TreeNode), texts: null };
    expect(tokensOf(bare, 1, new Map()).map((token) => token.text)).toEqual(["[5]", "[9]"]);
  });

  it("has a leaf for every sibling, also inside a branch", () => {
    const leaves = drawn(tree.nodes).flatMap((entry) => endingAt(entry, tree.branches).map((branch) => branch.sibling));
    expect(leaves.sort()).toEqual([0, 1, 2]);
    expect(endingAt(tree.nodes[0] as TreeNode, tree.branches).map((branch) => branch.sibling)).toEqual([2]);
    expect(siblingsThrough(tree.nodes[0] as TreeNode, tree.branches)).toEqual([0, 1, 2]);
  });

  it("counts forks and shared tokens without the prompt", () => {
    expect(forksOf(tree)).toEqual({ forks: 1, distinct: 5, first: 2 });
    expect(forksOf({ ...tree, nodes: [node(0, [8, 8], [], 0, [0])], branches: [{ sibling: 0, sequence: 0, node: 0, num_tokens: 2, call_ids: [] }] }).first).toBeNull();
  });
});

describe("a fork", () => {
  const fork: ResampledFork = {
    rollout_id: "r",
    sequence: 0,
    depth: 4,
    step: 2,
    model: "run@2",
    version: "run@2",
    branches: [5, 6].map((id) => ({ call_id: `c${id}`, ids: [id, 2], texts: null, logprobs: [-1, -2], finish_reason: "stop", text: "", reward: null, error: null })),
    score_gap: null,
    note: "",
    reward_note: "",
  };

  it("is a place to go on from only where somebody sampled what follows", () => {
    const named = { ...tree, siblings: tree.siblings.map((sibling, index) => ({ ...sibling, rollout_id: `r${index}` })) };
    const [root, first] = named.nodes as [TreeNode, TreeNode];
    expect(placeOf(root, named)).toEqual({ rollout: "r0", sequence: 0, depth: 4 });
    expect(placeOf(first, named)).toBeNull();
    const read = named.nodes.map((each) => (each.id ? { ...each, spans: [span(each.ids.length, { kind: "context" })] } : each));
    expect(placeOf(root, { ...named, nodes: read })).toBeNull();
  });

  it("grows a branch for every continuation, and the tree itself stays as it was", () => {
    const before = JSON.stringify(tree);
    const { tree: larger, added } = grown(tree, new Map([[0, fork]]));
    expect(JSON.stringify(tree)).toBe(before);
    expect(drawn(larger.nodes).map((each) => each.id)).toEqual([0, 1, 2, 3, 4]);
    expect([...added.keys()]).toEqual([3, 4]);
    const own = tokensOf(larger.nodes[3] as TreeNode, 0, new Map());
    expect(own.map((token) => [token.id, token.logprob, token.advantage, token.use])).toEqual([
      [5, -1, null, "sampled"],
      [2, -2, null, "sampled"],
    ]);
    expect(larger.nodes[3]?.depth).toBe(4);
    expect(endingAt(larger.nodes[3] as TreeNode, larger.branches)).toEqual([]);
  });
});

describe("a long stretch", () => {
  it("is shortened in the middle, and the number left out is true", () => {
    expect(shortened(0, 30).left).toBe(0);
    const long = shortened(10, 1010);
    expect(long.head[1] - long.head[0] + long.left + long.tail[1] - long.tail[0]).toBe(1000);
  });
});

describe("two sequences", () => {
  it("differ at the end of the shorter one if that is a beginning", () => {
    expect(firstDifference([1, 2], [1, 2, 3])).toBe(2);
    expect(firstDifference([1, 2], [3])).toBe(0);
    expect(firstDifference([], [])).toBe(0);
  });
});

describe("the tokens of a call", () => {
  const call = (more: Partial<CallView>): CallView =>
    ({
      fate: "trained",
      reason: null,
      advantage: 1,
      policy_step: 2,
      policy_version: "adder@2",
      prompt: { ids: [8], texts: ["q"], logprobs: null },
      output: { ids: [1, 2], texts: null, logprobs: [-1, -2] },
      ...more,
    }) as CallView;

  it("are context, then sampled", () => {
    const tokens = tokensOfCall(call({}), new Map([[2, 0]]));
    expect(tokens.map((token) => [token.text, token.use, token.advantage, token.logprob])).toEqual([
      ["q", "context", null, null],
      ["[1]", "trained", 1, -1],
      ["[2]", "trained", 1, -2],
    ]);
  });
  it("carry why they are not trained on", () => {
    expect(tokensOfCall(call({ fate: "dropped", reason: "zero_variance" }), new Map())[1]?.reason).toBe("no spread in the group");
    expect(tokensOfCall(call({ fate: "validation", advantage: null }), new Map())[1]?.use).toBe("sampled");
    expect(tokensOfCall(call({ prompt: null, output: null }), new Map())).toEqual([]);
  });
  it("take the trainer's logprobs once they are sent", () => {
    expect(tokensOfCall(call({ output: { ids: [1], texts: null, logprobs: [-1], trainer_logprobs: [-1.5] } }), new Map())[1]?.trainer).toBe(-1.5);
  });
});
