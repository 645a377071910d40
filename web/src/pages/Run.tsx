import { useState } from "preact/hooks";

import { api } from "../api";
import { Curve } from "../charts/Curve";
import { Spark } from "../charts/Spark";
import { Legend, Stack } from "../charts/Stack";
import { StepLane } from "../charts/StepLane";
import { ago, count, plural, seconds, sentence } from "../format";
import { useLoaded } from "../parts/hooks";
import { Pending } from "../parts/Notice";
import { To } from "../parts/To";
import { href } from "../route";
import { fatesSentence, phaseSentence, rewardSentence, totalSeconds } from "../summary";
import type { Alarm, RunView, StepPoint } from "../wire";
import { share, verdictSentence, verdictTitle, verdictTone, words } from "../words";

export function Run({ view, numRollouts }: { view: RunView; numRollouts: number }) {
  const { points } = view;
  return (
    <>
      <VerdictCard view={view} />
      {points.length === 0 ? (
        <section>
          <p>No step is over yet. {plural(numRollouts, "rollout")} recorded so far.</p>
          <p class="fix">
            <a href={href(["runs", view.run.key, "rollouts"])}>Look at the rollouts</a> while you wait: the first answers tell whether the reward is right.
          </p>
        </section>
      ) : (
        <Pictures view={view} />
      )}
      <Past view={view} numRollouts={numRollouts} />
    </>
  );
}

function VerdictCard({ view }: { view: RunView }) {
  const { verdict } = view.run;
  const tone = verdict ? verdictTone(verdict.code, verdict.needs_change) : "idle";
  const told = (alarm: Alarm) => verdict?.sentence.toLowerCase().includes(alarm.sentence.toLowerCase()) ?? false;
  return (
    <section class={`verdict ${tone}`} aria-label="Verdict">
      <p>
        <b>{verdict ? `${verdictTitle(verdict.code)}.` : "No verdict yet."}</b> {verdict ? verdictSentence(verdict) : "It comes with the first step."}
      </p>
      {view.alarms.length > 0 && (
        <ul class="alarms" aria-label="Alarms">
          {view.alarms.map((alarm) => (
            <li key={alarm.rule}>
              <p>
                <span class="chip warn">{words(alarm.rule)}</span> {!told(alarm) && alarm.sentence} <span class="soft small">since step {alarm.first_step}</span>
              </p>
              {alarm.setting && <p class="fix">Try: {alarm.setting}</p>}
            </li>
          ))}
        </ul>
      )}
      {view.run.state === "stopped" && (
        <p class="say bad">
          {view.run.failure ? `The run failed: ${sentence(view.run.failure)}` : "No process works on this run."}
          {view.run.updated_at !== null && ` Its files last changed ${ago(view.run.updated_at, Date.now() / 1000)}.`} <code>insitu finetune</code> with the same configuration continues it.
        </p>
      )}
      {view.run.problems.map((problem, index) => (
        <p key={index} class="say bad">
          {problem}
        </p>
      ))}
    </section>
  );
}

function Pictures({ view }: { view: RunView }) {
  const { points } = view;
  const xs = points.map((point) => point.number);
  const shares = view.reasons.map(share);
  const series = (pick: (point: StepPoint) => number | null) => points.map(pick);
  return (
    <>
      <div class="cols">
        <section>
          <h2>Reward</h2>
          <Curve
            label={`Reward over ${plural(points.length, "step")}`}
            unit="step"
            points={points.map((point) => ({
              x: point.number,
              value: point.reward?.mean ?? null,
              low: point.reward ? Math.max(point.reward.min, point.reward.mean - point.reward.std) : null,
              high: point.reward ? Math.min(point.reward.max, point.reward.mean + point.reward.std) : null,
            }))}
            marks={view.validations.filter((point) => !point.remeasured).map((point) => ({ x: point.step, value: point.reward, low: point.low, high: point.high }))}
          />
          <p class="legend">
            <span>
              <i class="key thin f-line" />
              training, all rollouts of the step, ± one standard deviation
            </span>
            {view.validations.length > 0 && (
              <span>
                <i class="key thin f-held" />
                held out, 95 % interval
              </span>
            )}
          </p>
          <p class="say">{rewardSentence(view)}</p>
        </section>
        <section>
          <h2>Where the rollouts of each step went</h2>
          <Stack label={`Where rollouts went, ${plural(points.length, "step")}`} unit="step" shares={shares} bars={points.map((point) => ({ x: point.number, values: point.fates }))} />
          <Legend shares={shares} />
          <p class="say">{fatesSentence(view)}</p>
        </section>
      </div>
      <div class="tiles">
        <Spark label="entropy" unit="step" xs={xs} values={series((point) => point.entropy)} say="Near zero, siblings are all alike." />
        <Spark label="KL" unit="step" xs={xs} values={series((point) => point.kl)} say="Distance from the reference." />
        <Spark label="mismatch KL" unit="step" xs={xs} values={series((point) => point.mismatch)} say="Sampler against trainer: far below 0.01." />
        <Spark label="gradient norm" unit="step" xs={xs} values={series((point) => point.grad_norm)} say="Single peaks are normal, growth is not." />
        <Spark label="tokens a rollout" unit="step" xs={xs} values={series((point) => point.lengths?.mean ?? null)} say="Growth without reward is rambling." />
        <Spark label="truncated" unit="step" xs={xs} values={series((point) => point.num_truncated)} say="Rollouts cut at the length limit." show={(value) => count(value)} />
        <Spark label="seconds a step" unit="step" xs={xs} values={series(totalSeconds)} say="All phases together." show={(value) => seconds(value)} />
        <Spark label="tokens a second" unit="step" xs={xs} values={series((point) => point.tokens_per_second)} say="Sampled, while rollouts ran." />
      </div>
      <Phases view={view} />
    </>
  );
}

function Phases({ view }: { view: RunView }) {
  return (
    <StepLane
      steps={view.points.map((point) => ({ number: point.number, seconds: point.seconds }))}
      phases={view.phases}
      say={(index) => {
        const point = view.points[index] as StepPoint;
        return (
          <>
            <p class="say">{phaseSentence(point)}</p>
            <p class="say">
              It had{" "}
              <To parts={["runs", view.run.key, "rollouts"]} filters={{ store: point.store }}>
                {plural(point.num_rollouts, "rollout")}
              </To>{" "}
              in{" "}
              <To parts={["runs", view.run.key, "groups"]} filters={{ store: point.store, sort: "spread" }}>
                {plural(point.num_groups, "group")}
              </To>
              .
            </p>
          </>
        );
      }}
    />
  );
}

/** Alarms that are over, failures, and the configuration: loaded when somebody opens them. */
function Past({ view, numRollouts }: { view: RunView; numRollouts: number }) {
  const [alarms, setAlarms] = useState(false);
  const [config, setConfig] = useState(false);
  return (
    <section>
      <p class="small soft">
        {view.run.run_id} · {view.run.method} on {view.run.base_model || "an unknown base model"} · {plural(view.run.num_steps, "step")} · {plural(numRollouts, "rollout")}, validations included
        {view.best_step !== null && ` · best weights: step ${view.best_step}`} · <span class="mono">{view.run.path}</span>
      </p>
      <details onToggle={(event) => setAlarms(event.currentTarget.open)}>
        <summary>All alarms and failures</summary>
        {alarms && <AllAlarms run={view.run.key} />}
      </details>
      <details onToggle={(event) => setConfig(event.currentTarget.open)}>
        <summary>Configuration</summary>
        {config && <Config run={view.run.key} />}
      </details>
    </section>
  );
}

function AllAlarms({ run }: { run: string }) {
  const loaded = useLoaded(`alarms ${run}`, (signal) => api.alarms(run, signal));
  if (loaded.value === null) return <Pending loaded={loaded} of="The alarms" />;
  const { alarms, failures } = loaded.value;
  if (alarms.length + failures.length === 0) return <p class="notice">No alarm was raised and nothing failed.</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Alarms">
      {alarms.length > 0 && (
        <table>
          <thead>
            <tr>
              <th>alarm</th>
              <th>steps</th>
              <th>cause</th>
              <th>try</th>
            </tr>
          </thead>
          <tbody>
            {alarms.map((alarm) => (
              <tr key={`${alarm.rule} ${alarm.first_step}`}>
                <td>
                  {words(alarm.rule)}
                  {alarm.active ? " (now)" : ""}
                </td>
                <td class="num">
                  {alarm.first_step} to {alarm.last_step}
                </td>
                <td>{alarm.sentence}</td>
                <td>{alarm.setting}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {failures.map((failure, index) => (
        <p key={index} class="say bad">
          {failure}
        </p>
      ))}
    </div>
  );
}

function Config({ run }: { run: string }) {
  const loaded = useLoaded(`config ${run}`, (signal) => api.config(run, signal));
  if (loaded.value === null) return <Pending loaded={loaded} of="The configuration" />;
  return <pre tabIndex={0}>{JSON.stringify(loaded.value.config, null, 2)}</pre>;
}
