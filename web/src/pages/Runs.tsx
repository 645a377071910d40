import { api } from "../api";
import { ago, count, figure, plural } from "../format";
import { useLoaded } from "../parts/hooks";
import { Pending } from "../parts/Notice";
import { href } from "../route";
import { stateText, stateTone, verdictSentence, verdictTitle, verdictTone } from "../words";

const TONES: Record<string, string> = { "": "ok", warn: "warn", bad: "bad", idle: "" };

export function Runs() {
  const loaded = useLoaded("runs", (signal) => api.runs(signal));
  const list = loaded.value;
  if (list === null) return <Pending loaded={loaded} of="The runs" />;
  const now = Date.now() / 1000;
  return (
    <>
      <h1>
        <b>{plural(list.runs.length, "run")}</b> in <span class="mono">{list.root}</span>
      </h1>
      {list.problems.map((problem, index) => (
        <p key={index} class="notice bad" role="alert">
          {problem}
        </p>
      ))}
      {list.runs.length === 0 && (
        <section>
          <p>No run was found here.</p>
          <p class="fix">
            <code>insitu finetune</code> writes one; give its <code>finetuning.output_dir</code>, or a folder of several, to <code>insitu view</code>.
          </p>
        </section>
      )}
      {list.runs.map((run) => (
        <section key={run.key} class={`verdict ${run.verdict ? verdictTone(run.verdict.code, run.verdict.needs_change) : "idle"}`}>
          <div class="row">
            <h2 class="plain">
              <a href={href(["runs", run.key])}>{run.name || run.run_id}</a>
            </h2>
            <span class={`chip ${run.state === "running" ? "ok" : stateTone(run)}`}>{stateText(run)}</span>
            {run.verdict && <span class={`chip ${TONES[verdictTone(run.verdict.code, run.verdict.needs_change)] ?? ""}`}>{verdictTitle(run.verdict.code).toLowerCase()}</span>}
            <span class="grow" />
            <span class="small soft">changed {ago(run.updated_at, now)}</span>
          </div>
          <p class="small">{run.verdict ? verdictSentence(run.verdict) : "No step is over yet, so there is no verdict."}</p>
          <dl class="stat">
            <div>
              <dt>steps</dt>
              <dd>{count(run.num_steps)}</dd>
            </div>
            <div>
              <dt>rollouts</dt>
              <dd>{count(run.num_rollouts)}</dd>
            </div>
            <div>
              <dt>reward, last step</dt>
              <dd>{figure(run.reward)}</dd>
            </div>
            <div>
              <dt>reward, held out</dt>
              <dd>{figure(run.validation)}</dd>
            </div>
            <div>
              <dt>method</dt>
              <dd>{run.method}</dd>
            </div>
            <div>
              <dt>base model</dt>
              <dd>{run.base_model || "–"}</dd>
            </div>
          </dl>
          {run.problems.map((problem, index) => (
            <p key={index} class="say bad">
              {problem}
            </p>
          ))}
        </section>
      ))}
    </>
  );
}
