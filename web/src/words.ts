// Words for the names that the records use.

import type { Share } from "./charts/Stack";
import type { Store, Verdict } from "./wire";

const FATES: Readonly<Record<string, [label: string, fill: string]>> = {
  trained: ["trained", "f-trained"],
  zero_variance: ["no spread in the group", "f-flat"],
  truncated: ["truncated", "f-truncated"],
  failed: ["failed", "f-failed"],
  stale: ["too old for the policy", "f-stale"],
  no_calls: ["no model call", "f-failed"],
  too_small: ["group too small", "f-other"],
  curriculum: ["left for later by the curriculum", "f-other"],
  subsample: ["not in the sample", "f-other"],
  constrained: ["constrained output", "f-other"],
  below_min_reward: ["reward too low", "f-other"],
  not_in_pair: ["not in a pair", "f-other"],
  waiting: ["waiting for its step", "f-flat"],
  dropped: ["dropped", "f-other"],
  validation: ["validation", "f-other"],
  set_aside: ["set aside", "f-flat"],
};

/** Names of the records become words: `tool_error` is "tool error". */
export function words(name: string): string {
  return name.replaceAll("_", " ");
}

export function fateLabel(name: string): string {
  return FATES[name]?.[0] ?? words(name);
}

export function share(name: string): Share {
  return { key: name, label: fateLabel(name), fill: FATES[name]?.[1] ?? "f-other" };
}

export const FATE_NAMES = ["trained", "dropped", "waiting", "validation", "set_aside"];

const VERDICTS: Readonly<Record<string, [title: string, tone: string]>> = {
  too_early: ["Too early to tell", "idle"],
  learning: ["Learning", ""],
  level: ["Level", ""],
  not_learning: ["Not learning", "bad"],
  overfitting: ["Overfitting", "bad"],
  falling: ["Getting worse", "bad"],
};

export function verdictTitle(code: string): string {
  return VERDICTS[code]?.[0] ?? words(code);
}

/** The sentence without the verdict's own word in front, which the page shows in bold. */
export function verdictSentence(verdict: Pick<Verdict, "code" | "sentence">): string {
  const front = verdictTitle(verdict.code).toLowerCase();
  const starts = verdict.sentence.toLowerCase().startsWith(front);
  const rest = starts ? verdict.sentence.slice(front.length).replace(/^[:\s]+/, "") : verdict.sentence;
  return rest.slice(0, 1).toUpperCase() + rest.slice(1);
}

export function verdictTone(code: string, needsChange: boolean): string {
  const tone = VERDICTS[code]?.[1] ?? "";
  return tone === "" && needsChange ? "warn" : tone;
}

/** A file of rollouts as people say it: `step 24`, `validation after step 20`. */
export function storeLabel(stores: readonly Store[], name: string): string {
  return stores.find((store) => store.name === name)?.label ?? name;
}

const BASES: Readonly<Record<string, string>> = {
  trainer: "Advantages are those that the trainer used.",
  trainer_function: "Advantages are computed here by the trainer's own function with the run's settings.",
  reward_minus_group_mean: "The run's settings are not known here: advantages are the reward minus the group's mean.",
  none: "These rollouts have no advantages: they are not for training, or the method has none.",
};

export function basisSentence(basis: string): string {
  return BASES[basis] ?? `Advantages: ${words(basis)}.`;
}

export const NO_TRAINER = "The trainer's logprob of each token is not kept with this run, so sampler − trainer cannot be shown.";

/** What a run is that no process works on. */
export function stateText(run: { state: string; outcome: string | null }): string {
  if (run.outcome !== null) return run.outcome;
  return run.state === "stopped" ? "stopped: no process works on it" : run.state;
}

export function stateTone(run: { state: string; outcome: string | null }): string {
  return run.state === "stopped" || run.outcome === "failed" ? "bad" : "";
}
