// Requests to the API of a backend, in the session of a key.

import { ApiError, request } from "../api";
import type { BackendRun, Checkpoint, FleetView, Promotion, Session, Step } from "../wire";

/** True if the pages come from the API, false if from `insitu view` or a report: the server says so in the page. */
export const onApi = typeof document !== "undefined" && document.querySelector<HTMLMetaElement>("meta[name=insitu-server]")?.content === "api";

let ended: () => void = () => undefined;

/** Call `action` when the API no longer accepts the session. */
export function whenSessionEnds(action: () => void): void {
  ended = action;
}

async function ask<T>(url: string, signal: AbortSignal, method = "GET"): Promise<T> {
  try {
    return await request<T>(url, signal, { method });
  } catch (problem) {
    if (problem instanceof ApiError && problem.status === 401) ended();
    throw problem;
  }
}

const NEVER = new AbortController().signal;
const run = (name: string) => `v1/runs/${encodeURIComponent(name)}`;

export const backend = {
  session: (signal: AbortSignal) => request<Session>("session", signal),
  logIn: (key: string) => request<Session>("login", NEVER, { method: "POST", body: { key } }),
  logOut: () => ask<void>("logout", NEVER, "POST"),
  fleet: (signal: AbortSignal) => ask<FleetView>("v1/fleet", signal),
  runs: (signal: AbortSignal) => ask<{ runs: BackendRun[] }>("v1/runs", signal),
  run: (name: string, signal: AbortSignal) => ask<BackendRun>(run(name), signal),
  checkpoints: (name: string, signal: AbortSignal) => ask<{ checkpoints: Checkpoint[] }>(`${run(name)}/checkpoints`, signal),
  promotions: (name: string, signal: AbortSignal) => ask<{ promotions: Promotion[] }>(`${run(name)}/promotions`, signal),
  steps: (name: string, after: number, signal: AbortSignal) => ask<{ steps: Step[] }>(`${run(name)}/steps?after=${after}`, signal),
  promote: (name: string, step: number) => ask<Promotion>(`${run(name)}/promoted/${step}`, NEVER, "PUT"),
  followNewest: (name: string) => ask<Promotion>(`${run(name)}/promoted`, NEVER, "DELETE"),
  rollBack: (name: string, promotion: number) => ask<Promotion>(`${run(name)}/promotions/${promotion}/rollback`, NEVER, "POST"),
};
