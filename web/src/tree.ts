// The prefix tree of a group, as the server sends it, prepared for drawing. Pure functions.

import type { Token } from "./parts/TokenFlow";
import type { ResampledBranch, ResampledFork, TreeBranch, TreeNode, TreeSpan, TreeView } from "./wire";

/** A token of the tree: what siblings that share it have in common. */
export interface TreeToken extends Token {
  numTrained: number;
  numSiblings: number;
}

/** Places of the policies in the order in which they appear, for colours. */
export function policyPlaces(steps: Iterable<number>): Map<number, number> {
  const places = new Map<number, number>();
  for (const step of [...new Set(steps)].sort((a, b) => a - b)) places.set(step, places.size);
  return places;
}

function useOf(span: TreeSpan): string {
  if (span.kind === "context") return "context";
  if (span.num_trained > 0) return "trained";
  return span.reasons.length ? "dropped" : "sampled";
}

/** The tokens of a node, one by one. A text that is not known is the id. */
export function tokensOf(node: TreeNode, numSiblings: number, places: ReadonlyMap<number, number>): TreeToken[] {
  const out: TreeToken[] = [];
  for (const span of node.spans) {
    const newest = span.policy_steps[span.policy_steps.length - 1];
    for (let index = 0; index < span.length; index += 1) {
      const at = out.length;
      const id = node.ids[at] ?? -1;
      out.push({
        id,
        text: node.texts?.[at] ?? `[${id}]`,
        advantage: span.advantage_sum,
        logprob: span.logprobs?.[index] ?? null,
        trainer: span.trainer_logprobs?.[index] ?? null,
        use: useOf(span),
        reason: span.reasons.join(", "),
        version: newest === undefined ? null : (places.get(newest) ?? null),
        policy: span.policy_steps.length ? `sampled at step ${span.policy_steps.join(", ")}` : "",
        numTrained: span.num_trained,
        numSiblings,
      });
    }
  }
  return out;
}

/** Siblings that pass through a node: those of its branches, each once. */
export function siblingsThrough(node: TreeNode, branches: readonly TreeBranch[]): number[] {
  const seen = new Set<number>();
  for (const place of node.branches) {
    const branch = branches[place];
    if (branch) seen.add(branch.sibling);
  }
  return [...seen];
}

/** Branches that end at this node, in the order of their siblings. */
export function endingAt(node: TreeNode, branches: readonly TreeBranch[]): TreeBranch[] {
  return node.branches.flatMap((place) => {
    const branch = branches[place];
    return branch?.node === node.id ? [branch] : [];
  });
}

/** Every node, parents before children, in the order in which they are drawn. Nodes that form a circle are left out. */
export function drawn(nodes: readonly TreeNode[]): TreeNode[] {
  const out: TreeNode[] = [];
  const seen = new Set<number>();
  const open = nodes[0] ? [nodes[0]] : [];
  for (let node = open.pop(); node; node = open.pop()) {
    if (seen.has(node.id)) continue;
    seen.add(node.id);
    out.push(node);
    for (const child of [...node.children].reverse()) {
      const next = nodes[child];
      if (next) open.push(next);
    }
  }
  return out;
}

/** A place to go on from, as the server takes it. */
export interface Place {
  rollout: string;
  sequence: number;
  depth: number;
}

/** The place at the end of a node; null unless it is a fork after which somebody sampled. */
export function placeOf(node: TreeNode, tree: TreeView): Place | null {
  const branch = tree.branches[node.branches[0] ?? -1];
  const sibling = branch && tree.siblings[branch.sibling];
  const depth = node.depth + node.ids.length;
  const goesOn = node.children.some((child) => tree.nodes[child]?.spans[0]?.kind === "sampled");
  return branch && sibling && depth > 0 && goesOn ? { rollout: sibling.rollout_id, sequence: branch.sequence, depth } : null;
}

export interface Grown {
  tree: TreeView;
  /** The continuation that each added node is, by its id. */
  added: ReadonlyMap<number, { branch: ResampledBranch; fork: ResampledFork }>;
}

/** The tree with a branch for each continuation, from the node whose fork they go on from. */
export function grown(tree: TreeView, forks: ReadonlyMap<number, ResampledFork>): Grown {
  const nodes = [...tree.nodes];
  const added = new Map<number, { branch: ResampledBranch; fork: ResampledFork }>();
  for (const [at, fork] of forks) {
    const parent = nodes[at];
    if (!parent) continue;
    const ids = fork.branches.map((branch) => {
      const id = nodes.length;
      const span: TreeSpan = { length: branch.ids.length, kind: "sampled", num_sampled: 1, num_trained: 0, advantage_sum: null, reasons: [], policy_steps: [], logprobs: branch.logprobs, trainer_logprobs: null };
      nodes.push({ id, parent: at, children: [], depth: fork.depth, ids: branch.ids, texts: branch.texts, spans: [span], branches: [] });
      added.set(id, { branch, fork });
      return id;
    });
    nodes[at] = { ...parent, children: [...parent.children, ...ids] };
  }
  return { tree: { ...tree, nodes }, added };
}

export interface Forks {
  forks: number;
  /** Tokens of the answers, a shared one counted once. */
  distinct: number;
  /** Where the first fork is, in tokens after the prompt; null without one. */
  first: number | null;
}

export function forksOf(tree: TreeView): Forks {
  const nodes = drawn(tree.nodes);
  const forking = nodes.filter((node) => node.children.length + (endingAt(node, tree.branches).length ? 1 : 0) > 1);
  const all = nodes.reduce((sum, node) => sum + node.ids.length, 0);
  return {
    forks: forking.length,
    distinct: Math.max(0, all - tree.num_prompt_tokens),
    first: forking.length ? Math.max(0, Math.min(...forking.map((node) => node.depth + node.ids.length)) - tree.num_prompt_tokens) : null,
  };
}

/** How much of a long run of tokens is drawn: its beginning and its end, with the number left out between. */
export function shortened(first: number, end: number, head = 24, tail = 8): { head: [number, number]; left: number; tail: [number, number] } {
  if (end - first <= head + tail + 4) return { head: [first, end], left: 0, tail: [end, end] };
  return { head: [first, first + head], left: end - first - head - tail, tail: [end - tail, end] };
}

/** Length of the common beginning of two sequences. */
export function firstDifference(left: readonly number[], right: readonly number[]): number {
  const shorter = Math.min(left.length, right.length);
  let at = 0;
  while (at < shorter && left[at] === right[at]) at += 1;
  return at;
}
