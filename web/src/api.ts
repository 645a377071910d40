// Requests to the server of the pages: same origin, each with a deadline. A run directory is only read.

import { kept } from "./kept";
import type { AlarmList, CompareView, ConfigView, GroupPage, GroupView, JsonObject, ResampledFork, RescoredGroup, RolloutPage, RolloutView, RunList, RunView } from "./wire";

const DEADLINE_MS = 20_000;
const SCORING_MS = 75_000;
const SAMPLING_MS = 120_000;

/** An answer other than 2xx, in the server's words. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly hint: string,
  ) {
    super(message);
    this.name = "ApiError";
  }
}

type Filters = Readonly<Record<string, string | number | null | undefined>>;

export function address(parts: readonly (string | number)[], filters: Filters = {}): string {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(filters)) if (value !== null && value !== undefined && value !== "") search.set(key, String(value));
  const tail = search.toString();
  return `view/v1/${parts.map((part) => encodeURIComponent(String(part))).join("/")}${tail ? `?${tail}` : ""}`;
}

/** False in a report that does not hold the page of one thing. */
export function reachable(parts: readonly (string | number)[]): boolean {
  return kept === null || Object.hasOwn(kept.answers, address(parts));
}

async function get<T>(url: string, signal: AbortSignal): Promise<T> {
  if (kept !== null) {
    if (Object.hasOwn(kept.answers, url)) return kept.answers[url] as T;
    throw new ApiError("This is not in the report.", 404, kept.notice);
  }
  return request<T>(url, signal);
}

interface Sent {
  method?: string;
  body?: JsonObject;
  headers?: Record<string, string>;
  deadline?: number;
}

/** Send a request and read its answer; `undefined` if it has none. */
export async function request<T>(url: string, signal: AbortSignal, { method = "GET", body, headers, deadline = DEADLINE_MS }: Sent = {}): Promise<T> {
  const all = { accept: "application/json", ...(body && { "content-type": "application/json" }), ...headers };
  let answer: Response;
  try {
    answer = await fetch(url, { method, headers: all, signal: AbortSignal.any([signal, AbortSignal.timeout(deadline)]), ...(body && { body: JSON.stringify(body) }) });
  } catch (problem) {
    if (signal.aborted) throw problem;
    const late = problem instanceof DOMException && problem.name === "TimeoutError";
    throw new ApiError(late ? `No answer within ${deadline / 1000} seconds.` : "The server does not answer.", 0, "Is the command that serves these pages still running?");
  }
  if (answer.status === 204) return undefined as T;
  if (answer.ok) return (await answer.json()) as T;
  throw await errorOf(answer);
}

async function errorOf(answer: Response): Promise<ApiError> {
  try {
    const body = (await answer.json()) as { error?: { message?: unknown; hint?: unknown } };
    return new ApiError(String(body.error?.message ?? `The server answered ${answer.status}.`), answer.status, String(body.error?.hint ?? ""));
  } catch {
    return new ApiError(`The server answered ${answer.status}.`, answer.status, "");
  }
}

export const api = {
  runs: (signal: AbortSignal) => get<RunList>(address(["runs"]), signal),
  run: (run: string, signal: AbortSignal) => get<RunView>(address(["runs", run]), signal),
  config: (run: string, signal: AbortSignal) => get<ConfigView>(address(["runs", run, "config"]), signal),
  alarms: (run: string, signal: AbortSignal) => get<AlarmList>(address(["runs", run, "alarms"]), signal),
  rollouts: (run: string, filters: Filters, signal: AbortSignal) => get<RolloutPage>(address(["runs", run, "rollouts"], filters), signal),
  rollout: (run: string, id: string, signal: AbortSignal) => get<RolloutView>(address(["runs", run, "rollouts", id]), signal),
  groups: (run: string, filters: Filters, signal: AbortSignal) => get<GroupPage>(address(["runs", run, "groups"], filters), signal),
  group: (run: string, store: string, index: string, signal: AbortSignal) => get<GroupView>(address(["runs", run, "groups", store, index]), signal),
  rescore: (run: string, store: string, index: number, secret: string, signal: AbortSignal) =>
    request<RescoredGroup>(address(["runs", run, "groups", store, index, "rescore"]), signal, { method: "POST", headers: { "x-insitu-own-page": secret }, deadline: SCORING_MS }),
  resample: (run: string, store: string, index: number, asked: Filters, secret: string, signal: AbortSignal) =>
    request<ResampledFork>(address(["runs", run, "groups", store, index, "resample"], asked), signal, { method: "POST", headers: { "x-insitu-own-page": secret }, deadline: SAMPLING_MS + SCORING_MS }),
  compare: (run: string, filters: Filters, signal: AbortSignal) => get<CompareView>(address(["runs", run, "compare"], filters), signal),
  events: (run: string, after: string) => address(["runs", run, "events"], { after }),
};
