// Requests to the server of the pages: same origin, each with a deadline; all GET, but for a new score.

import { kept } from "./kept";
import type { AlarmList, CompareView, ConfigView, GroupPage, GroupView, RescoredGroup, RolloutPage, RolloutView, RunList, RunView } from "./wire";

const DEADLINE_MS = 20_000;
const SCORING_MS = 75_000;

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

async function get<T>(url: string, signal: AbortSignal): Promise<T> {
  return request<T>(url, signal, DEADLINE_MS, { headers: { accept: "application/json" } });
}

async function request<T>(url: string, signal: AbortSignal, deadline: number, options: RequestInit): Promise<T> {
  if (kept !== null) {
    if (Object.hasOwn(kept.answers, url)) return kept.answers[url] as T;
    throw new ApiError("This is not in the report.", 404, kept.notice);
  }
  let answer: Response;
  try {
    answer = await fetch(url, { ...options, signal: AbortSignal.any([signal, AbortSignal.timeout(deadline)]) });
  } catch (problem) {
    if (signal.aborted) throw problem;
    const late = problem instanceof DOMException && problem.name === "TimeoutError";
    throw new ApiError(late ? `No answer within ${deadline / 1000} seconds.` : "The server does not answer.", 0, "Is the command that serves these pages still running?");
  }
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
    request<RescoredGroup>(address(["runs", run, "groups", store, index, "rescore"]), signal, SCORING_MS, { method: "POST", headers: { accept: "application/json", "x-insitu-own-page": secret } }),
  compare: (run: string, filters: Filters, signal: AbortSignal) => get<CompareView>(address(["runs", run, "compare"], filters), signal),
  events: (run: string, after: string) => address(["runs", run, "events"], { after }),
};
