import { useMemo } from "preact/hooks";

import { api } from "../api";
import { placesOf, tokensOfCall } from "../calls";
import { AdvantageBar, Interval } from "../charts/AdvantageBar";
import { count, figure, oneLine, percent, plural, signed } from "../format";
import { kept } from "../kept";
import { useLoaded } from "../parts/hooks";
import { Pending } from "../parts/Notice";
import { usePages } from "../parts/pages";
import { scalesOf, type Token, TokenFlow } from "../parts/TokenFlow";
import { VirtualTable } from "../parts/VirtualTable";
import { changed, href, type Route } from "../route";
import { firstDifference } from "../tree";
import type { ComparedExample, ComparedSide, CompareView, RolloutView, RunView, Store } from "../wire";
import { Select } from "./Rollouts";

const SHARED_SHOWN = 16;

/** Two validations if there are two, else the first and the last step. */
export function defaults(stores: readonly Store[]): { before: string; after: string } | null {
  for (const kind of ["validation", "training"]) {
    const some = stores.filter((store) => store.kind === kind);
    const first = some[0];
    const last = some[some.length - 1];
    if (first && last && first !== last) return { before: first.name, after: last.name };
  }
  return null;
}

export function Compare({ view, route }: { view: RunView; route: Route }) {
  const run = view.run.key;
  const other = route.query["other"] ?? "";
  const runs = useLoaded("runs", (signal) => api.runs(signal));
  const otherView = useLoaded(`other ${other}`, (signal) => (other && other !== run ? api.run(other, signal) : Promise.resolve(view)));
  const right = other && other !== run ? otherView.value : view;
  const usual = defaults(view.stores);
  // Two runs are compared where each ends; one run, before and after.
  const before = route.query["before"] ?? (other ? usual?.after : usual?.before) ?? "";
  const after = route.query["after"] ?? (other ? (right ? defaults(right.stores)?.after : undefined) : usual?.after) ?? "";
  const set = (changes: Record<string, string>) => location.replace(changed(route, { before, after, example: "", ...changes }));
  const names = (stores: readonly Store[]): [string, string][] => stores.filter((store) => store.kind !== "set_aside").map((store) => [store.name, store.label]);
  return (
    <>
      <h1>
        <b>Compare</b> on the same examples
      </h1>
      <section>
        <form class="filters" aria-label="What to compare" hidden={kept !== null} onSubmit={(event) => event.preventDefault()}>
          <Select label="before" value={before} onChange={(value) => set({ before: value })} options={names(view.stores)} />
          <Select label="after" value={after} onChange={(value) => set({ after: value })} options={right ? names(right.stores) : []} />
          <Select
            label="of the run"
            value={other || run}
            onChange={(value) => set({ other: value === run ? "" : value, before: "", after: "" })}
            options={(runs.value?.runs ?? [view.run]).map((entry): [string, string] => [entry.key, `${entry.name || entry.run_id}${entry.key === run ? " (this one)" : ""}`])}
          />
        </form>
        {!before || !after ? <p class="say">There is only one file of rollouts so far: nothing to compare it with.</p> : null}
      </section>
      {before && after && <Sides view={view} route={route} before={before} after={after} other={other} />}
    </>
  );
}

function Sides({ view, route, before, after, other }: { view: RunView; route: Route; before: string; after: string; other: string }) {
  const run = view.run.key;
  const key = JSON.stringify([run, before, after, other]);
  const pages = usePages<CompareView, ComparedExample>(
    key,
    (cursor, signal) => api.compare(run, { before, after, other, cursor, limit: 100 }, signal),
    (page) => page.examples,
    (row) => row.example_id,
  );
  const page = pages.first;
  const chosen = pages.rows.find((row) => row.example_id === route.query["example"]) ?? null;
  if (pages.error) return <Pending loaded={{ state: "failed", error: pages.error, value: null }} of="The comparison" />;
  if (page === null) return <Pending loaded={{ state: "loading", value: null }} of="The comparison" />;
  const { gain } = page;
  return (
    <>
      <section class={`verdict ${gain?.verdict === "worse" ? "bad" : gain?.verdict === "better" ? "" : "idle"}`}>
        {gain ? (
          <>
            <p>
              <b>{gain.verdict === "better" ? "Better." : gain.verdict === "worse" ? "Worse." : gain.verdict === "too_few" ? "Too few examples." : "Unclear."}</b> {gain.sentence}
            </p>
            <Interval value={gain.difference} low={gain.low} high={gain.high} label={`Difference ${signed(gain.difference, 3)}`} />
            <p class="say">
              Difference {signed(gain.difference, 3)}
              {gain.low !== null && gain.high !== null && `, ${percent(gain.confidence)} interval ${signed(gain.low, 3)} to ${signed(gain.high, 3)}`}, paired over {plural(gain.num_examples, "example")}
              {gain.num_unpaired > 0 && `; ${plural(gain.num_unpaired, "example")} with a reward on one side only`}. An interval that crosses zero may be chance.
            </p>
          </>
        ) : (
          <p>
            <b>Nothing to pair.</b> No example has a reward on both sides.
          </p>
        )}
        <dl class="stat">
          <Side title="before" side={page.before} />
          <Side title="after" side={page.after} />
        </dl>
        {page.configuration.length > 0 && (
          <>
            <p class="say">The configurations differ:</p>
            <ul class="say">
              {page.configuration.map((line, index) => (
                <li key={index}>{line}</li>
              ))}
            </ul>
          </>
        )}
      </section>
      {chosen && <Pair view={view} other={other || run} example={chosen} titles={[page.before.label, page.after.label]} />}
      {pages.rows.length > 0 && (
        <>
          <VirtualTable<ComparedExample>
            key={key}
            label="Examples"
            kind="compared"
            rows={pages.rows}
            total={kept === null ? page.total : pages.rows.length}
            hasMore={pages.next !== null}
            onMore={pages.more}
            idOf={(row) => row.example_id}
            hrefOf={(row) => changed(route, { before, after, example: row.example_id })}
            columns={[
              { name: "question", cell: "c-question", show: (row) => oneLine(row.question) || row.example_id },
              { name: "before", cell: "right num", show: (row) => figure(row.before) },
              { name: "after", cell: "right num", show: (row) => figure(row.after) },
              {
                name: "difference",
                cell: "num",
                show: (row) => (
                  <>
                    <AdvantageBar value={row.difference} full={1} /> {signed(row.difference)}
                  </>
                ),
              },
            ]}
          />
          <p class="say">{plural(page.total, "example")}, the largest change first{pages.rows.length < page.total && kept !== null ? `; ${count(pages.rows.length)} of them are in this report` : ""}. Choose one to see both answers side by side.</p>
        </>
      )}
    </>
  );
}

function Side({ title, side }: { title: string; side: ComparedSide }) {
  return (
    <div>
      <dt>
        {title}: {side.label}
      </dt>
      <dd>
        {figure(side.reward)}
        {side.standard_error !== null && <span class="soft"> ± {figure(side.standard_error)}</span>} <span class="small soft">{plural(side.num_rollouts, "rollout")}{side.num_failed > 0 && `, ${count(side.num_failed)} failed`}</span>
      </dd>
    </div>
  );
}

function Pair({ view, other, example, titles }: { view: RunView; other: string; example: ComparedExample; titles: [string, string] }) {
  const run = view.run.key;
  const { rollout_before: left, rollout_after: right } = example;
  const loaded = useLoaded(JSON.stringify([run, other, left, right]), (signal) =>
    Promise.all([left === null ? null : api.rollout(run, left, signal), right === null ? null : api.rollout(other, right, signal)]),
  );
  if (loaded.state !== "ready") return <Pending loaded={loaded} of="The two rollouts" />;
  const [one, two] = loaded.value;
  return (
    <section>
      <h2>{oneLine(example.question, 120) || example.example_id}</h2>
      <Aligned
        run={run}
        other={other}
        left={one}
        right={two}
        titles={titles}
      />
    </section>
  );
}

function sequence(rollout: RolloutView | null): Token[] {
  if (rollout === null) return [];
  const places = placesOf(rollout.calls);
  return rollout.calls.flatMap((call) => tokensOfCall(call, places));
}

function Aligned({ run, other, left, right, titles }: { run: string; other: string; left: RolloutView | null; right: RolloutView | null; titles: [string, string] }) {
  const [one, two] = useMemo(() => [sequence(left), sequence(right)], [left, right]);
  const at = firstDifference(one.map((token) => token.id), two.map((token) => token.id));
  const scales = useMemo(() => scalesOf([...one, ...two]), [one, two]);
  const from = Math.max(0, at - SHARED_SHOWN);
  const same = at === one.length && at === two.length;
  const both = one.length > 0 && two.length > 0;
  const sides: [string, string, RolloutView | null, Token[]][] = [
    [titles[0], run, left, one],
    [titles[1], other, right, two],
  ];
  return (
    <>
      <p class="say">
        {!both
          ? "One side has no recorded tokens, so they cannot be aligned."
          : same
            ? `Both wrote the same ${plural(at, "token")}.`
            : `The first ${plural(at, "token")} are the same; then they differ. Shown from ${plural(at - from, "token")} before. Darker tokens were less likely.`}
      </p>
      <div class="pair">
        {sides.map(([title, of, rollout, tokens], index) => (
          <div key={index}>
            <h3>
              {title}{" "}
              {rollout && (
                <a class="small" href={href(["runs", of, "rollouts", rollout.row.rollout_id])}>
                  rollout {rollout.row.generation}, reward {figure(rollout.row.reward)}
                </a>
              )}
            </h3>
            {rollout === null ? <p class="notice">No rollout of this example.</p> : <TokenFlow label={title} tokens={tokens.slice(both ? from : 0)} by="logprob" scales={scales} mark={both && !same ? at - from : null} />}
          </div>
        ))}
      </div>
    </>
  );
}
