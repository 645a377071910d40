import { useEffect, useRef, useState } from "preact/hooks";

import { Curve } from "../charts/Curve";
import { Spark } from "../charts/Spark";
import { Legend, Stack } from "../charts/Stack";
import { StepLane } from "../charts/StepLane";
import { percent, plural, seconds } from "../format";
import { pause } from "../live";
import { useLoaded } from "../parts/hooks";
import { Pending } from "../parts/Notice";
import { href } from "../route";
import { fatesSentence, phaseSentence, totalSeconds, trainingSentence } from "../summary";
import type { BackendRun, FleetView, Step } from "../wire";
import { share } from "../words";
import { backend } from "./calls";
import { fatesOf, figuresOf, metric, type StepFigures } from "./figures";

const REFRESH_MS = 3000;
/** The most steps in one answer of the API. */
const PAGE = 1000;

interface Seen {
  run: BackendRun;
  steps: Step[];
  /** The step that trains now. */
  now: FleetView["phases"][number] | null;
}

/** Ask for what is new since `before`. A run that fell back is read again: another job made its last known step. */
async function load(name: string, before: Seen | null, signal: AbortSignal): Promise<Seen> {
  const [run, fleet] = await Promise.all([backend.run(name, signal), backend.fleet(signal)]);
  let steps = [...(before?.steps ?? [])];
  for (;;) {
    const last = steps.pop();
    const page = (await backend.steps(name, (last?.step ?? 1) - 1, signal)).steps;
    if (last !== undefined && page[0]?.job_id !== last.job_id) {
      steps = [];
      continue;
    }
    steps.push(...page);
    if (page.length < PAGE) break;
  }
  return { run, steps, now: fleet.phases.find((each) => each.run === name) ?? null };
}

/** A run as the backend knows it: its steps with their figures, and the step under way. */
export function RunOfBackend({ name }: { name: string }) {
  const [again, setAgain] = useState(0);
  const seen = useRef<Seen | null>(null);
  const failures = useRef(0);
  const loaded = useLoaded(`run ${name}`, async (signal) => (seen.current = await load(name, seen.current, signal)), again);
  useEffect(() => {
    if (loaded.state === "loading") return;
    failures.current = loaded.state === "failed" ? failures.current + 1 : 0;
    const timer = setTimeout(() => setAgain((now) => now + 1), Math.max(REFRESH_MS, failures.current ? pause(failures.current) : 0));
    return () => clearTimeout(timer);
  }, [loaded]);
  if (loaded.value === null) return <Pending loaded={loaded} of="The run" />;
  const { run, now } = loaded.value;
  const steps = loaded.value.steps.map(figuresOf);
  return (
    <>
      <h1>
        <b>{run.name}</b> after {plural(run.step, "step")}
      </h1>
      {loaded.state === "failed" && (
        <p class="notice bad" role="alert">
          These figures may be old: {loaded.error.message}
        </p>
      )}
      <section class={`verdict ${run.state === "failed" ? "bad" : ""}`}>
        <h2 class="plain">{now === null ? `The run is ${run.state}; no step trains now` : `A step trains: ${now.phase || "it starts"}, ${percent(now.progress)}`}</h2>
        {run.error !== null && <p class="say bad">{run.error}</p>}
        <p class="say">
          Validation rewards, verdicts and rollouts are in the run's directory beside the agent: <code>insitu view</code> shows them.
        </p>
      </section>
      {steps.length === 0 ? (
        <section>
          <p>No step is committed yet.</p>
        </section>
      ) : (
        <Pictures run={run} steps={steps} />
      )}
    </>
  );
}

function Pictures({ run, steps }: { run: BackendRun; steps: readonly StepFigures[] }) {
  const xs = steps.map((step) => step.step);
  const series = (name: string) => steps.map((step) => metric(step, name));
  const shares = fatesOf(steps).map(share);
  const phases = [...new Set(steps.flatMap((step) => Object.keys(step.seconds)))];
  return (
    <>
      <div class="cols">
        <section>
          <h2>Reward</h2>
          <Curve label={`Reward over ${plural(steps.length, "step")}`} unit="step" points={steps.map((step) => ({ x: step.step, value: step.reward?.mean ?? null, low: step.reward?.low ?? null, high: step.reward?.high ?? null }))} marks={[]} />
          <p class="legend">
            <span>
              <i class="key thin f-line" />
              training, ± one standard deviation over rollouts
            </span>
          </p>
          <p class="say">{trainingSentence(steps.flatMap((step) => (step.reward === null ? [] : [step.reward.mean])))}</p>
        </section>
        <section>
          <h2>Where the uploaded rollouts of each step went</h2>
          <Stack label={`Where uploaded rollouts went, ${plural(steps.length, "step")}`} unit="step" shares={shares} bars={steps.map((step) => ({ x: step.step, values: step.fates }))} />
          <Legend shares={shares} />
          <p class="say">{fatesSentence({ points: steps })}</p>
        </section>
      </div>
      <div class="tiles">
        <Spark label="entropy" unit="step" xs={xs} values={series("entropy")} say="Near zero, siblings are all alike." />
        <Spark label="KL" unit="step" xs={xs} values={steps.map((step) => metric(step, "kl/reference") ?? metric(step, "kl/teacher"))} say="Distance from the reference." />
        <Spark label="mismatch KL" unit="step" xs={xs} values={series("mismatch/kl")} say="Sampler against trainer: far below 0.01." />
        <Spark label="gradient norm" unit="step" xs={xs} values={series("grad_norm")} say="Single peaks are normal, growth is not." />
        <Spark label="loss" unit="step" xs={xs} values={series("loss")} say="Of the first pass; with rewards it need not fall." />
        <Spark label="sampled tokens" unit="step" xs={xs} values={series("num_tokens")} say="That the step trained on." />
        <Spark label="age" unit="step" xs={xs} values={series("staleness/max")} say="Steps since the oldest call was sampled." />
        <Spark label="seconds a step" unit="step" xs={xs} values={steps.map(totalSeconds)} say="All phases together." show={(value) => seconds(value)} />
      </div>
      <StepLane
        steps={steps.map((step) => ({ number: step.step, seconds: step.seconds }))}
        phases={phases}
        say={(index) => (
          <>
            <p class="say">{phaseSentence(steps[index] ?? { seconds: {} })}</p>
            <p class="say">
              <a href={href(["runs", run.name, "checkpoints"])}>The kept steps</a>, and which of them calls get.
            </p>
          </>
        )}
      />
    </>
  );
}
