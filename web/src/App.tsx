import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { api } from "./api";
import { Backend } from "./backend/Backend";
import { onApi } from "./backend/calls";
import { percent } from "./format";
import { kept } from "./kept";
import { type LiveState, useLive } from "./live";
import { Compare } from "./pages/Compare";
import { Group } from "./pages/Group";
import { Groups } from "./pages/Groups";
import { Rollout } from "./pages/Rollout";
import { Rollouts } from "./pages/Rollouts";
import { Run } from "./pages/Run";
import { Runs } from "./pages/Runs";
import { useLoaded, useRoute } from "./parts/hooks";
import { Pending } from "./parts/Notice";
import { href, type Route } from "./route";
import { type Link, Shell } from "./Shell";
import { stateText, stateTone } from "./words";
import type { RunEvent, RunView } from "./wire";

const REFRESH_MS = 1500;

export function App() {
  const route = useRoute();
  const [first, run] = route.parts;
  const reported = kept?.run ?? null;
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          document.getElementById("main")?.focus();
        }}
      >
        Skip to the page
      </a>
      {onApi ? <Backend route={route} /> : reported !== null && first === undefined ? <InRun key={reported} run={reported} route={{ parts: ["runs", reported], query: {} }} /> : first === "runs" && run !== undefined ? <InRun key={run} run={run} route={route} /> : <Frame route={route} view={null} title="Runs"><Runs /></Frame>}
    </>
  );
}

/** Every page of one run: loads the run once, follows it, and hands it to the page. */
function InRun({ run, route }: { run: string; route: Route }) {
  const [again, setAgain] = useState(0);
  const [rollouts, setRollouts] = useState<number | null>(null);
  const loaded = useLoaded(run, (signal) => api.run(run, signal), again);
  const view = loaded.value;
  const timer = useRef(0);
  const refresh = () => {
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setAgain((now) => now + 1), REFRESH_MS);
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  const live = useLive(run, view?.cursor ?? null, kept === null && view !== null && view.run.state !== "ended", (event: RunEvent) => {
    setRollouts(event.num_rollouts);
    if (event.kind !== "rollouts") refresh();
  });
  const indexed = view?.run.indexed ?? 1;
  useEffect(() => {
    if (indexed < 1) refresh();
  }, [view]);
  const section = route.parts[2] ?? "run";
  if (view === null) {
    return (
      <Frame route={route} view={null} title={section}>
        <Pending loaded={loaded} of="The run" />
      </Frame>
    );
  }
  const numRollouts = Math.max(rollouts ?? 0, view.run.num_rollouts);
  return (
    <Frame route={route} view={view} live={live} title={`${section} · ${view.run.name || view.run.run_id}`}>
      {loaded.state === "failed" && (
        <p class="notice bad" role="alert">
          These figures may be old: {loaded.error.message}
        </p>
      )}
      {kept !== null && <p class="notice">{kept.notice}</p>}
      {indexed < 1 && (
        <p class="notice" role="status">
          The server has read {percent(indexed)} of this run's rollouts so far; tables and groups grow until it has them all.
        </p>
      )}
      <Page view={view} route={route} numRollouts={numRollouts} />
    </Frame>
  );
}

function Page({ view, route, numRollouts }: { view: RunView; route: Route; numRollouts: number }) {
  const [, , section, one, two] = route.parts;
  switch (section) {
    case undefined:
      return <Run view={view} numRollouts={numRollouts} />;
    case "rollouts":
      return one === undefined ? <Rollouts view={view} route={route} numRollouts={numRollouts} /> : <Rollout view={view} route={route} id={one} />;
    case "groups":
      return one === undefined || two === undefined ? <Groups view={view} route={route} /> : <Group view={view} route={route} store={one} index={two} />;
    case "compare":
      return <Compare view={view} route={route} />;
    default:
      return (
        <section role="alert">
          There is no page "{section}". <a href={href(["runs", view.run.key])}>Back to the run</a>
        </section>
      );
  }
}

const LIVE: Record<LiveState, [string, string]> = {
  off: ["", ""],
  connecting: ["connecting …", ""],
  live: ["live", "ok"],
  waiting: ["connection lost, trying again …", "warn"],
};

function Frame({ route, view, live = "off", title, children }: { route: Route; view: RunView | null; live?: LiveState; title: string; children: ComponentChildren }) {
  const run = view?.run.key ?? (route.parts[0] === "runs" ? route.parts[1] : undefined);
  const section = run === undefined ? "runs" : (route.parts[2] ?? "run");
  const [liveText, liveTone] = LIVE[live];
  const links: Link[] = kept === null ? [["runs", "Runs", "#/"]] : [];
  if (run !== undefined) {
    links.push(["run", "Run", href(["runs", run])]);
    for (const name of ["rollouts", "groups", "compare"]) links.push([name, name.slice(0, 1).toUpperCase() + name.slice(1), href(["runs", run, name])]);
  }
  const chips = view && (
    <>
      <span class="chip ok">
        {view.run.name || view.run.run_id} · step {view.run.step}
      </span>
      <span class={`chip ${view.run.state === "running" ? liveTone : stateTone(view.run)}`} role="status">
        {view.run.state === "running" ? liveText || "running" : stateText(view.run)}
      </span>
    </>
  );
  return (
    <Shell path={route.parts.join("/")} title={title} links={links} current={section} chips={chips}>
      {children}
    </Shell>
  );
}
