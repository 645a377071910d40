import { ago, count, plural } from "../format";
import { useLoaded } from "../parts/hooks";
import { Pending } from "../parts/Notice";
import { href } from "../route";
import { backend } from "./calls";

/** The runs that the key reaches, newest first. */
export function BackendRuns() {
  const loaded = useLoaded("runs", backend.runs);
  if (loaded.value === null) return <Pending loaded={loaded} of="The runs" />;
  const runs = [...loaded.value.runs].reverse();
  const now = Date.now() / 1000;
  return (
    <>
      <h1>
        <b>{plural(runs.length, "run")}</b> on this backend
      </h1>
      {runs.length === 0 && (
        <section>
          <p>No run is registered, or none that this key reaches.</p>
        </section>
      )}
      {runs.map((run) => (
        <section key={run.name}>
          <div class="row">
            <h2 class="plain">
              <a href={href(["runs", run.name])}>{run.name}</a>
            </h2>
            <span class={`chip ${run.state === "ready" ? "ok" : run.state === "failed" ? "bad" : ""}`}>{run.state}</span>
            <span class="grow" />
            <span class="small soft">changed {ago(run.updated_at, now)}</span>
          </div>
          {run.error !== null && <p class="say bad">{run.error}</p>}
          <dl class="stat">
            <div>
              <dt>steps</dt>
              <dd>{count(run.step)}</dd>
            </div>
            <div>
              <dt>its plain name gets</dt>
              <dd>{run.promoted === null ? "the newest step" : `step ${count(run.promoted)}`}</dd>
            </div>
            <div>
              <dt>base model</dt>
              <dd>{run.base_model}</dd>
            </div>
          </dl>
        </section>
      ))}
    </>
  );
}
