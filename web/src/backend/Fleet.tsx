import { useEffect, useState } from "preact/hooks";

import { ago, bytes, count, percent, seconds } from "../format";
import { useLoaded } from "../parts/hooks";
import { Pending } from "../parts/Notice";
import { href } from "../route";
import type { FleetView } from "../wire";
import { backend } from "./calls";

const REFRESH_MS = 3000;

/** The processes, engines, trainer ranks, queues and disk of a backend, asked for again every few seconds. */
export function Fleet() {
  const [again, setAgain] = useState(0);
  const loaded = useLoaded("fleet", backend.fleet, again);
  useEffect(() => {
    if (loaded.state === "loading") return;
    const timer = setTimeout(() => setAgain((now) => now + 1), REFRESH_MS);
    return () => clearTimeout(timer);
  }, [loaded]);
  const fleet = loaded.value;
  if (fleet === null) return <Pending loaded={loaded} of="The fleet" />;
  return (
    <>
      <h1>
        <b>Fleet</b> of this backend{fleet.model !== null && <>, with {fleet.model}</>}
      </h1>
      {loaded.state === "failed" && (
        <p class="notice bad" role="alert">
          These figures may be old: {loaded.error.message}
        </p>
      )}
      <section class={`verdict ${fleet.causes.length ? "warn" : ""}`}>
        <h2 class="plain">{fleet.causes.length ? "Calls or steps have to wait" : "Calls and steps can be sent"}</h2>
        {fleet.causes.map((cause) => (
          <p key={cause} class="small">
            {cause}
          </p>
        ))}
        <p class="say">{fleet.report_age_seconds === null ? "The supervisor has reported nothing." : `The supervisor is ${fleet.state ?? "silent"}; its report is ${seconds(fleet.report_age_seconds)} old.`}</p>
      </section>
      <Phases fleet={fleet} />
      <Engines fleet={fleet} />
      <Trainer fleet={fleet} />
      <section>
        <h2>Processes and disk</h2>
        <dl class="stat">
          {fleet.processes.map((each) => (
            <div key={each.name}>
              <dt>{each.name}</dt>
              <dd>{each.pid === null ? "starts again" : `pid ${each.pid}`}</dd>
            </div>
          ))}
          <div>
            <dt>disk of the state directory</dt>
            <dd>
              {bytes(fleet.disk_free_bytes)} of {bytes(fleet.disk_size_bytes)} free ({percent(fleet.disk_free_bytes / fleet.disk_size_bytes)})
            </dd>
          </div>
        </dl>
      </section>
    </>
  );
}

function Phases({ fleet }: { fleet: FleetView }) {
  const now = Date.now() / 1000;
  return (
    <section>
      <h2>Steps</h2>
      {fleet.phases.map((each) => (
        <p key={each.job_id}>
          <a href={href(["runs", each.run])}>{each.run}</a>: {each.phase || "begins"}, {percent(each.progress)}
          <span class="small soft">
            {" "}
            began {ago(each.started_at, now)}
            {each.attempt > 1 && `, attempt ${each.attempt}`}
          </span>
        </p>
      ))}
      {fleet.phases.length === 0 && <p class="small soft">No step of a run that this key reaches is being trained.</p>}
      <dl class="stat">
        {Object.entries(fleet.jobs).map(([state, number]) => (
          <div key={state}>
            <dt>{state}</dt>
            <dd>{count(number)}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

function Engines({ fleet }: { fleet: FleetView }) {
  const { gateway } = fleet;
  return (
    <section>
      <h2>Engines and the gateway's queues</h2>
      {fleet.replicas.length === 0 && <p class="small soft">No engine is reported: the first registration loads a model.</p>}
      {fleet.replicas.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Engines">
          <table>
            <thead>
              <tr>
                <th>engine</th>
                <th>takes calls</th>
                <th>healthy</th>
                <th>weights</th>
                <th class="num">calls under way</th>
                <th class="num">pid</th>
              </tr>
            </thead>
            <tbody>
              {fleet.replicas.map((each) => (
                <tr key={each.id}>
                  <td>{each.id}</td>
                  <td class={each.joined ? "" : "bad"}>{each.joined ? "yes" : "no"}</td>
                  <td class={each.healthy === false ? "bad" : ""}>{each.healthy === null ? "–" : each.healthy ? "yes" : "no"}</td>
                  <td>
                    {each.versions.join(", ") || "–"}
                    {each.num_versions > each.versions.length && ` and ${count(each.num_versions - each.versions.length)} more`}
                  </td>
                  <td class="num">{count(each.in_flight)}</td>
                  <td class="num">{each.pid ?? "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {gateway === null ? (
        <p class="say">The gateway has not answered the supervisor.</p>
      ) : (
        <dl class="stat">
          <div>
            <dt>calls under way</dt>
            <dd>{count(gateway.in_flight)}</dd>
          </div>
          <div>
            <dt>held back</dt>
            <dd>{count(gateway.held)}</dd>
          </div>
          <div>
            <dt>waiting to be recorded</dt>
            <dd>{count(gateway.record_backlog)}</dd>
          </div>
          <div>
            <dt>recorded since the start</dt>
            <dd>{count(gateway.recorded)}</dd>
          </div>
          {Object.entries(gateway.versions).map(([version, calls]) => (
            <div key={version}>
              <dt>under way to {version}</dt>
              <dd>{count(calls)}</dd>
            </div>
          ))}
        </dl>
      )}
    </section>
  );
}

function Trainer({ fleet }: { fleet: FleetView }) {
  return (
    <section>
      <h2>Trainer</h2>
      {fleet.waiting !== null && <p class="bad">Training waits: {fleet.waiting}</p>}
      {fleet.ranks.length === 0 ? (
        <p class="small soft">No rank is loaded; the next step starts them.</p>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Trainer ranks">
          <table>
            <thead>
              <tr>
                <th>rank</th>
                <th>device</th>
                <th>type</th>
                <th class="num">threads</th>
                <th class="num">pid</th>
              </tr>
            </thead>
            <tbody>
              {fleet.ranks.map((each) => (
                <tr key={each.rank}>
                  <td>{each.rank}</td>
                  <td>{each.device}</td>
                  <td>{each.dtype}</td>
                  <td class="num">{count(each.num_threads)}</td>
                  <td class="num">{each.pid ?? "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
