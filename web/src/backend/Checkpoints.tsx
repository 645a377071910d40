import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";

import { ApiError } from "../api";
import { ago, figure, plural } from "../format";
import { useLoaded } from "../parts/hooks";
import { Pending } from "../parts/Notice";
import type { BackendRun, Checkpoint, JsonObject, Promotion, Session, Step } from "../wire";
import { backend } from "./calls";

/** Columns of the table; the other metrics are folded. */
const METRICS = ["reward/mean", "loss", "mismatch/kl"];

/** Until the decision is served, the page asks again. */
const REFRESH_MS = 3000;

interface Kept {
  run: BackendRun;
  checkpoints: Checkpoint[];
  promotions: Promotion[];
  steps: Map<number, Step>;
}

async function load(name: string, signal: AbortSignal): Promise<Kept> {
  const [run, { checkpoints }, { promotions }] = await Promise.all([backend.run(name, signal), backend.checkpoints(name, signal), backend.promotions(name, signal)]);
  const first = Math.min(...checkpoints.map((each) => each.step));
  const steps = checkpoints.length ? (await backend.steps(name, Math.max(0, first - 1), signal)).steps : [];
  return { run, checkpoints: [...checkpoints].reverse(), promotions, steps: new Map(steps.map((each) => [each.step, each])) };
}

/** Bring a new question into sight, from wherever it was asked. */
const focus = (element: HTMLElement | null) => element?.focus();

/** A decision that the reader has begun: what it means, and the request that makes it. */
interface Decision {
  says: string;
  label: string;
  send: () => Promise<unknown>;
}

/** The kept steps of a run, the one that calls get, and the buttons that decide it. */
export function Checkpoints({ name, session }: { name: string; session: Session }) {
  const [again, setAgain] = useState(0);
  const [decision, setDecision] = useState<Decision | null>(null);
  const [problem, setProblem] = useState<Error | null>(null);
  const [busy, setBusy] = useState(false);
  const loaded = useLoaded(`checkpoints ${name}`, (signal) => load(name, signal), again);
  useEffect(() => {
    if (loaded.state !== "ready" || !loaded.value.promotions.at(-1)?.reason) return;
    const timer = setTimeout(() => setAgain((now) => now + 1), REFRESH_MS);
    return () => clearTimeout(timer);
  }, [loaded]);
  const kept = loaded.value;
  if (kept === null || loaded.state === "failed") return <Pending loaded={loaded} of="The checkpoints" />;
  const { run, promotions } = kept;
  const last = promotions.at(-1);
  const newest = kept.checkpoints[0]?.step;
  const served = run.promoted ?? newest;
  const waits = last !== undefined && last.reason !== "";
  const decide = async (chosen: Decision) => {
    setBusy(true);
    setProblem(null);
    try {
      await chosen.send();
    } catch (error) {
      setProblem(error instanceof Error ? error : new Error(String(error)));
    } finally {
      setBusy(false);
      setDecision(null);
      setAgain((now) => now + 1);
    }
  };
  const mayDecide = session.scopes.includes("admin");
  return (
    <>
      <h1>
        <b>Checkpoints</b> of {run.name}
      </h1>
      <section class="verdict">
        <h2 class="plain">{served === undefined ? "No step is kept yet" : `Calls to ${run.name} ${waits ? "are to get" : "get"} step ${served}`}</h2>
        <p class="small">{run.promoted === null ? "They follow the newest step." : "It was promoted; training goes on behind it."}</p>
        {waits && <p class="say bad">Not served yet: {last.reason}</p>}
        {mayDecide ? (
          <p class="row">
            {run.promoted !== null && (
              <button onClick={() => setDecision({ says: `Calls to ${run.name} follow the newest step from now on.`, label: "Follow the newest step", send: () => backend.followNewest(name) })}>Follow the newest step</button>
            )}
            {last && last.back_to !== null && (
              <button onClick={() => setDecision({ says: `Calls to ${run.name} get what they got before the last decision.`, label: "Roll back", send: () => backend.rollBack(name, last.id) })}>Roll back</button>
            )}
          </p>
        ) : (
          <p class="say">Promoting and rolling back need a key with the scope admin.</p>
        )}
        {decision && (
          <p class="row" role="alert">
            <b>{decision.says}</b>
            <button ref={focus} disabled={busy} onClick={() => void decide(decision)}>
              Yes: {decision.label}
            </button>
            <button disabled={busy} onClick={() => setDecision(null)}>
              Cancel
            </button>
          </p>
        )}
        {problem && (
          <p class="say bad" role="alert">
            {problem.message} {problem instanceof ApiError && problem.hint}
          </p>
        )}
      </section>
      <p class="notice">{plural(kept.checkpoints.length, "kept step")}, newest first.</p>
      {kept.checkpoints.map((each) => (
        <Row key={each.step} each={each} step={kept.steps.get(each.step)} served={each.step === served && !waits}>
          {mayDecide && each.step !== run.promoted && (
            <button onClick={() => setDecision({ says: `Calls to ${run.name} get step ${each.step} from now on.`, label: `Promote step ${each.step}`, send: () => backend.promote(name, each.step) })}>Promote step {each.step}</button>
          )}
        </Row>
      ))}
    </>
  );
}

function Row({ each, step, served, children }: { each: Checkpoint; step: Step | undefined; served: boolean; children: ComponentChildren }) {
  const metrics: JsonObject = step?.metrics ?? {};
  const command = `insitu export ${each.run}@${each.step} ${each.run}-${each.step} --url ${location.origin}`;
  return (
    <section>
      <div class="row">
        <h2 class="plain">Step {each.step}</h2>
        {served && <span class="chip ok">served</span>}
        {each.promoted && !served && <span class="chip">kept for a rollback</span>}
        {each.pinned && <span class="chip">pinned</span>}
        <span class="grow" />
        <span class="small soft">{ago(each.created_at, Date.now() / 1000)}</span>
        {children}
      </div>
      <dl class="stat">
        {METRICS.filter((name) => name in metrics).map((name) => (
          <Metric key={name} name={name} value={metrics[name]} />
        ))}
      </dl>
      {Object.keys(metrics).length > 0 && (
        <details>
          <summary>all figures of the step</summary>
          <dl class="stat">
            {Object.entries(metrics).map(([name, value]) => (
              <Metric key={name} name={name} value={value} />
            ))}
          </dl>
        </details>
      )}
      <p class="row say">
        <code>{command}</code>
        {/* Browsers offer the clipboard to pages of this machine and of TLS only. */}
        {navigator.clipboard && <button onClick={() => void navigator.clipboard.writeText(command)}>Copy</button>}
      </p>
    </section>
  );
}

function Metric({ name, value }: { name: string; value: unknown }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{typeof value === "number" ? figure(value) : String(value)}</dd>
    </div>
  );
}
