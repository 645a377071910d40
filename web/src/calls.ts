// The tokens of a rollout's calls, one list. Pure functions.

import type { Token } from "./parts/TokenFlow";
import { policyPlaces } from "./tree";
import type { CallView, TokenColumn } from "./wire";
import { fateLabel } from "./words";

/** The tokens of one call: its own part of the prompt, which is context, and what it sampled. */
export function tokensOfCall(call: CallView, places: ReadonlyMap<number, number>): Token[] {
  const trained = call.fate === "trained";
  const use = trained ? "trained" : call.fate === "dropped" ? "dropped" : call.fate === "context" ? "context" : "sampled";
  const reason = call.reason ? fateLabel(call.reason) : trained ? "" : `${fateLabel(call.fate)}: not trained on`;
  const policy = call.policy_version || `step ${call.policy_step}`;
  return [
    ...column(call.prompt, { use: "context", reason: "", advantage: null, policy: "", version: null }),
    ...column(call.output, { use, reason, advantage: call.advantage, policy: `sampled by ${policy}`, version: places.get(call.policy_step) ?? null }),
  ];
}

function column(tokens: TokenColumn | null, common: Pick<Token, "use" | "reason" | "advantage" | "policy" | "version">): Token[] {
  if (tokens === null) return [];
  return tokens.ids.map((id, index) => ({
    id,
    text: tokens.texts?.[index] ?? `[${id}]`,
    logprob: tokens.logprobs?.[index] ?? null,
    trainer: tokens.trainer_logprobs?.[index] ?? null,
    ...common,
  }));
}

export function placesOf(calls: readonly CallView[]): Map<number, number> {
  return policyPlaces(calls.map((call) => call.policy_step));
}
