import { Component, type ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { api } from "./api";
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
import type { RunEvent, RunView } from "./wire";

const REFRESH_MS = 1500;

export function App() {
  const route = useRoute();
  const [first, run] = route.parts;
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
      {first === "runs" && run !== undefined ? <InRun key={run} run={run} route={route} /> : <Frame route={route} view={null} title="Runs"><Runs /></Frame>}
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
  const path = route.parts.join("/");
  const main = useRef<HTMLElement>(null);
  const before = useRef(path);
  useEffect(() => {
    document.title = `${title} · insitu`;
  }, [title]);
  useEffect(() => {
    if (before.current === path) return;
    const samePage = before.current.split("/").slice(0, 3).join("/") === path.split("/").slice(0, 3).join("/");
    before.current = path;
    // A new page: readers start at its top. A slider that changes the address keeps its focus.
    if (samePage && main.current?.contains(document.activeElement) && document.activeElement !== main.current) return;
    main.current?.focus({ preventScroll: true });
    scrollTo(0, 0);
  }, [path]);
  const link = (key: string, label: string, to: string) => (
    <a href={to} {...(section === key ? { "aria-current": "page" as const } : {})}>
      {label}
    </a>
  );
  const [liveText, liveTone] = LIVE[live];
  return (
    <>
      <header>
        <a class="logo" href="#/">
          insitu
        </a>
        <nav aria-label="Pages">
          {link("runs", "Runs", "#/")}
          {run !== undefined && (
            <>
              {link("run", "Run", href(["runs", run]))}
              {link("rollouts", "Rollouts", href(["runs", run, "rollouts"]))}
              {link("groups", "Groups", href(["runs", run, "groups"]))}
              {link("compare", "Compare", href(["runs", run, "compare"]))}
            </>
          )}
        </nav>
        <span class="grow" />
        {view && (
          <span class="chip ok">
            {view.run.name || view.run.run_id} · step {view.run.step}
          </span>
        )}
        {view && (
          <span class={`chip ${liveTone}`} role="status">
            {liveText || (view.run.outcome ?? view.run.state)}
          </span>
        )}
      </header>
      <main id="main" ref={main} tabIndex={-1}>
        <Guard path={path}>{children}</Guard>
      </main>
    </>
  );
}

/** An error in a page stays in the page, with its words. */
class Guard extends Component<{ path: string; children: ComponentChildren }, { error: Error | null }> {
  override state = { error: null as Error | null };

  override componentDidUpdate(before: { path: string }): void {
    if (before.path !== this.props.path && this.state.error) this.setState({ error: null });
  }

  override componentDidCatch(error: unknown): void {
    this.setState({ error: error instanceof Error ? error : new Error(String(error)) });
  }

  override render() {
    const { error } = this.state;
    if (!error) return this.props.children;
    return (
      <section role="alert">
        <p>
          <b>This page cannot show what it was given.</b> {error.message}
        </p>
        <p class="fix">Reload it. If it fails again, report the address and this sentence.</p>
      </section>
    );
  }
}
