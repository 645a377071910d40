import { useEffect, useRef, useState } from "preact/hooks";

import { api } from "../api";
import { count, figure, oneLine, plural } from "../format";
import { kept } from "../kept";
import { Pending } from "../parts/Notice";
import { usePages } from "../parts/pages";
import { VirtualTable } from "../parts/VirtualTable";
import { changed, href, type Route } from "../route";
import type { RolloutRow, RunView } from "../wire";
import { FATE_NAMES, fateLabel, storeLabel, words } from "../words";

const FILTERS = ["text", "kind", "store", "epoch", "index", "ending", "fate", "reason", "min_reward", "max_reward", "sort"] as const;
const SORTS: readonly [string, string][] = [
  ["", "oldest first"],
  ["newest", "newest first"],
  ["best", "highest reward"],
  ["worst", "lowest reward"],
  ["longest", "longest"],
];
const KINDS: readonly [string, string][] = [
  ["", "all"],
  ["training", "training"],
  ["validation", "validation"],
  ["remeasured", "measured again"],
  ["set_aside", "set aside"],
];

export function Rollouts({ view, route, numRollouts }: { view: RunView; route: Route; numRollouts: number }) {
  const run = view.run.key;
  const filters: Record<string, string> = {};
  for (const name of FILTERS) if (route.query[name]) filters[name] = route.query[name];
  const key = JSON.stringify([run, filters]);
  const pages = usePages(
    key,
    (cursor, signal) => api.rollouts(run, { ...filters, cursor, limit: 100 }, signal),
    (page) => page.rollouts,
    (row) => `${row.store}/${row.rollout_id}`,
  );
  const set = (changes: Record<string, string>) => location.replace(changed(route, changes));
  const page = pages.first;
  const total = page?.total ?? 0;
  const narrowed = Object.keys(filters).some((name) => name !== "sort");
  const outcome = filters["reason"] ? `reason:${filters["reason"]}` : filters["fate"] ? `fate:${filters["fate"]}` : "";
  return (
    <>
      <h1>
        <b>Rollouts</b> of {view.run.name || view.run.run_id}
      </h1>
      <section>
        <form class="filters" role="search" aria-label="Filters" hidden={kept !== null} onSubmit={(event) => event.preventDefault()}>
          <TextFilter value={filters["text"] ?? ""} onChange={(text) => set({ text })} />
          <Select label="kind" value={filters["kind"] ?? ""} onChange={(kind) => set({ kind })} options={KINDS} />
          <Select
            label="step or validation"
            value={filters["store"] ?? ""}
            onChange={(store) => set({ store })}
            options={[["", "all"], ...view.stores.map((store): [string, string] => [store.name, store.label])]}
          />
          <Select
            label="ending"
            value={filters["ending"] ?? ""}
            onChange={(ending) => set({ ending })}
            options={[["", "all"], ...Object.entries(page?.endings ?? {}).map(([name, number]): [string, string] => [name, `${words(name)} (${count(number)})`])]}
          />
          <Select
            label="where it went"
            value={outcome}
            onChange={(value) => {
              const [kind, name = ""] = value.split(":");
              set({ fate: kind === "fate" ? name : "", reason: kind === "reason" ? name : "" });
            }}
            options={[
              ["", "all"],
              ...Object.entries(page?.reasons ?? {}).map(([name, number]): [string, string] => [`${FATE_NAMES.includes(name) ? "fate" : "reason"}:${name}`, `${fateLabel(name)} (${count(number)})`]),
            ]}
          />
          <NumberFilter label="reward from" value={filters["min_reward"] ?? ""} onChange={(value) => set({ min_reward: value })} />
          <NumberFilter label="to" value={filters["max_reward"] ?? ""} onChange={(value) => set({ max_reward: value })} />
          <Select label="order" value={filters["sort"] ?? ""} onChange={(sort) => set({ sort })} options={SORTS} />
          {narrowed && (
            <a class="chip" href={href(["runs", run, "rollouts"])}>
              clear filters
            </a>
          )}
        </form>
        <p class="say" role="status">
          {page === null
            ? "Loading …"
            : kept !== null
              ? `${plural(total, "rollout")} of ${count(numRollouts)} ${total === 1 ? "is" : "are"} in this report.`
              : `${plural(total, "rollout")}${narrowed ? ` of ${count(numRollouts)} match the filters` : ""}. The address of this page holds the filters.`}
        </p>
      </section>
      {pages.error && <Pending loaded={{ state: "failed", error: pages.error, value: null }} of="The rollouts" />}
      {page !== null && total === 0 && !pages.error && (
        <section>
          <p>{narrowed ? "No rollout matches these filters." : "No rollout is recorded yet."}</p>
        </section>
      )}
      {pages.rows.length > 0 && (
        <VirtualTable<RolloutRow>
          key={key}
          label="Rollouts"
          kind="rollouts"
          rows={pages.rows}
          total={total}
          hasMore={pages.next !== null}
          onMore={pages.more}
          idOf={(row) => `${row.store}/${row.rollout_id}`}
          hrefOf={(row) => href(["runs", run, "rollouts", row.rollout_id])}
          columns={[
            { name: "question", cell: "c-question", show: (row) => oneLine(row.question) || row.example_id },
            { name: "reward", cell: "c-reward right num", show: (row) => <b>{figure(row.reward)}</b> },
            { name: "answer", cell: "c-answer c-wide", show: (row) => oneLine(row.answer || row.failure) || <span class="soft">none</span> },
            { name: "ending", cell: "c-soft", show: (row) => <Outcome row={row} /> },
            { name: "tokens", cell: "c-soft right num", show: (row) => count(row.num_output_tokens) },
            { name: "from", cell: "c-step hide-narrow", show: (row) => `${storeLabel(view.stores, row.store)} #${row.generation}` },
          ]}
        />
      )}
    </>
  );
}

function Outcome({ row }: { row: RolloutRow }) {
  const went = row.reason ? fateLabel(row.reason) : fateLabel(row.fate);
  return (
    <>
      <span class={row.failure ? "bad" : ""}>{words(row.ending)}</span>, {went}
    </>
  );
}

/** Search as people type, with a pause so that not every letter is a request. */
export function TextFilter({ value, onChange }: { value: string; onChange: (value: string) => void }) {
  const [text, setText] = useState(value);
  const timer = useRef(0);
  useEffect(() => setText(value), [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  return (
    <label class="wide">
      question, answer or failure
      <input
        type="search"
        value={text}
        placeholder="has these words"
        onInput={(event) => {
          const next = event.currentTarget.value;
          setText(next);
          clearTimeout(timer.current);
          timer.current = window.setTimeout(() => onChange(next), 300);
        }}
      />
    </label>
  );
}

function NumberFilter({ label, value, onChange }: { label: string; value: string; onChange: (value: string) => void }) {
  return (
    <label>
      {label}
      <input class="short" type="number" step="any" value={value} onChange={(event) => onChange(event.currentTarget.value)} />
    </label>
  );
}

export function Select({ label, value, onChange, options }: { label: string; value: string; onChange: (value: string) => void; options: readonly (readonly [string, string])[] }) {
  const known = options.some(([key]) => key === value);
  return (
    <label>
      {label}
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {!known && <option value={value}>{value}</option>}
        {options.map(([key, text]) => (
          <option key={key} value={key}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}
