// The pages of a backend's API, behind a login.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";

import { ApiError } from "../api";
import { useLoaded } from "../parts/hooks";
import { Pending } from "../parts/Notice";
import { href, type Route } from "../route";
import { type Link, Shell } from "../Shell";
import type { Session } from "../wire";
import { backend, whenSessionEnds } from "./calls";
import { Checkpoints } from "./Checkpoints";
import { Fleet } from "./Fleet";
import { Login } from "./Login";
import { RunOfBackend } from "./Run";
import { BackendRuns } from "./Runs";

export function Backend({ route }: { route: Route }) {
  const [again, setAgain] = useState(0);
  const loaded = useLoaded("session", sessionOrNone, again);
  useEffect(() => whenSessionEnds(() => setAgain((now) => now + 1)), []);
  const path = route.parts.join("/");
  const session = loaded.value;
  if (session === null) {
    return (
      <Shell path={path} title="Backend" links={[]} current="">
        <Pending loaded={loaded} of="The session" />
      </Shell>
    );
  }
  if (session === "none") {
    return (
      <Shell path={path} title="Log in" links={[]} current="">
        <Login onDone={() => setAgain((now) => now + 1)} />
      </Shell>
    );
  }
  return <Pages session={session} route={route} path={path} />;
}

async function sessionOrNone(signal: AbortSignal): Promise<Session | "none"> {
  try {
    return await backend.session(signal);
  } catch (problem) {
    if (problem instanceof ApiError && problem.status === 401) return "none";
    throw problem;
  }
}

function Pages({ session, route, path }: { session: Session; route: Route; path: string }) {
  const links: Link[] = [
    ["runs", "Runs", "#/"],
    ["fleet", "Fleet", "#/fleet"],
  ];
  const chips = (
    <>
      <span class="chip">
        {session.key}
        {session.project !== null && ` · ${session.project}`} · {session.scopes.join(", ")}
      </span>
      <button onClick={() => void backend.logOut().finally(() => location.reload())}>Log out</button>
    </>
  );
  const [first, run, part] = route.parts;
  const frame = (current: string, title: string, page: ComponentChildren) => (
    <Shell path={path} title={title} links={links} current={current} chips={chips}>
      {page}
    </Shell>
  );
  if (first === "fleet") return frame("fleet", "Fleet", <Fleet />);
  if (first !== "runs" || run === undefined) return frame("runs", "Runs", <BackendRuns />);
  links.push(["run", run, href(["runs", run])], ["checkpoints", "Checkpoints", href(["runs", run, "checkpoints"])]);
  if (part === "checkpoints") return frame("checkpoints", `Checkpoints of ${run}`, <Checkpoints key={run} name={run} session={session} />);
  return frame("run", run, <RunOfBackend key={run} name={run} />);
}
