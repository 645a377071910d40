import { api } from "../api";
import { figure, oneLine, plural } from "../format";
import { kept } from "../kept";
import { Pending } from "../parts/Notice";
import { usePages } from "../parts/pages";
import { VirtualTable } from "../parts/VirtualTable";
import { changed, href, type Route } from "../route";
import type { GroupRow, RunView } from "../wire";
import { storeLabel } from "../words";
import { Select, TextFilter } from "./Rollouts";

export function Groups({ view, route }: { view: RunView; route: Route }) {
  const run = view.run.key;
  const filters = { text: route.query["text"] ?? "", store: route.query["store"] ?? "", kind: route.query["kind"] ?? "", sort: route.query["sort"] ?? "spread" };
  const key = JSON.stringify([run, filters]);
  const pages = usePages(
    key,
    (cursor, signal) => api.groups(run, { ...filters, cursor, limit: 100 }, signal),
    (page) => page.groups,
    (row) => `${row.store}/${row.index}`,
  );
  const set = (changes: Record<string, string>) => location.replace(changed(route, changes));
  const total = pages.first?.total ?? 0;
  return (
    <>
      <h1>
        <b>Groups</b> of {view.run.name || view.run.run_id}
      </h1>
      <section>
        <form class="filters" role="search" aria-label="Filters" hidden={kept !== null} onSubmit={(event) => event.preventDefault()}>
          <TextFilter value={filters.text} onChange={(text) => set({ text })} />
          <Select
            label="step or validation"
            value={filters.store}
            onChange={(store) => set({ store })}
            options={[["", "all"], ...view.stores.map((store): [string, string] => [store.name, store.label])]}
          />
          <Select
            label="order"
            value={filters.sort}
            onChange={(sort) => set({ sort })}
            options={[
              ["spread", "largest spread"],
              ["oldest", "oldest first"],
              ["newest", "newest first"],
            ]}
          />
        </form>
        <p class="say" role="status">
          {pages.first === null ? "Loading …" : `${plural(total, "group")}${kept !== null ? " in this report" : ""}. A group is one example's rollouts of one step; one whose rollouts all earn the same teaches nothing.`}
        </p>
      </section>
      {pages.error && <Pending loaded={{ state: "failed", error: pages.error, value: null }} of="The groups" />}
      {pages.rows.length > 0 && (
        <VirtualTable<GroupRow>
          key={key}
          label="Groups"
          kind="groups"
          rows={pages.rows}
          total={total}
          hasMore={pages.next !== null}
          onMore={pages.more}
          idOf={(row) => `${row.store}/${row.index}`}
          hrefOf={(row) => href(["runs", run, "groups", row.store, row.index])}
          columns={[
            { name: "question", cell: "c-question", show: (row) => oneLine(row.question) || row.example_id },
            { name: "reward", cell: "right num", show: (row) => <b>{figure(row.reward)}</b> },
            { name: "from", cell: "c-soft", show: (row) => storeLabel(view.stores, row.store) },
            { name: "lowest to highest", cell: "c-soft num", show: (row) => (row.reward_min === null ? "no reward" : `${figure(row.reward_min)} to ${figure(row.reward_max)}`) },
            { name: "trained", cell: "c-soft num", show: (row) => `${row.num_trained} of ${row.num_rollouts} trained` },
          ]}
        />
      )}
    </>
  );
}
