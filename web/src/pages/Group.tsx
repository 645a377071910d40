import { useEffect, useMemo, useState } from "preact/hooks";

import { api, reachable } from "../api";
import { AdvantageBar } from "../charts/AdvantageBar";
import { Curve } from "../charts/Curve";
import type { ColourBy, Scales } from "../colour";
import { count, figure, oneLine, plural, signed, visibleToken } from "../format";
import { ColourChoice, ColourKey, colourOf, hasTrainer } from "../parts/Colours";
import { useLoaded } from "../parts/hooks";
import { Message, Value } from "../parts/Message";
import { Pending } from "../parts/Notice";
import { Resample, type Chosen } from "../parts/Resample";
import { Rescore } from "../parts/Rescore";
import { To } from "../parts/To";
import { describe, scalesOf, TokenSpan } from "../parts/TokenFlow";
import { href, type Route } from "../route";
import { drawn, endingAt, forksOf, grown, type Grown, placeOf, policyPlaces, shortened, siblingsThrough, tokensOf, type TreeToken } from "../tree";
import type { GroupAtStep, GroupView, ResampledFork, RunView, TreeBranch, TreeNode, TreeView } from "../wire";
import { basisSentence, fateLabel, storeLabel, words } from "../words";

export function Group({ view, route, store, index }: { view: RunView; route: Route; store: string; index: string }) {
  const run = view.run.key;
  const loaded = useLoaded(`${run} ${store} ${index}`, (signal) => api.group(run, store, index, signal));
  const group = loaded.value;
  if (group === null || loaded.state === "failed") return <Pending loaded={loaded} of="The group" />;
  const by = colourOf(route.query["colour"]);
  const times = group.steps.filter((step) => reachable(["runs", run, "groups", step.store, step.index]));
  const at = Math.max(
    0,
    times.findIndex((step) => step.store === store && String(step.index) === index),
  );
  const setColour = (colour: ColourBy) => location.replace(href(route.parts, { ...route.query, colour: colour === "advantage" ? "" : colour }));
  const setStep = (place: number) => {
    const step = times[place];
    if (step) location.replace(href(["runs", run, "groups", step.store, step.index], route.query));
  };
  return <Shown view={view} group={group} times={times} by={by} at={at} setColour={setColour} setStep={setStep} />;
}

interface ShownProps {
  view: RunView;
  group: GroupView;
  /** The example in those steps whose groups can be shown. */
  times: readonly GroupAtStep[];
  by: ColourBy;
  at: number;
  setColour: (colour: ColourBy) => void;
  setStep: (place: number) => void;
}

function Shown({ view, group, times, by, at, setColour, setStep }: ShownProps) {
  const run = view.run.key;
  const [forks, setForks] = useState<ReadonlyMap<number, ResampledFork>>(new Map());
  const [chosen, setChosen] = useState<Chosen | null>(null);
  useEffect(() => {
    setForks(new Map());
    setChosen(null);
  }, [group]);
  const { tree } = group;
  const prepared = useMemo(() => prepare(grown(tree, forks)), [tree, forks]);
  const step = times[at];
  const choose = (node: TreeNode) => {
    const place = placeOf(node, tree);
    if (place) setChosen({ node: node.id, place, after: place.depth - tree.num_prompt_tokens });
  };
  return (
    <>
      <h1>
        <To parts={["runs", run, "groups"]} filters={{ store: group.store }}>
          {storeLabel(view.stores, group.store)}
        </To>{" "}
        › example <b>{oneLine(group.example_id, 80)}</b>
      </h1>
      <section class="row">
        {times.length > 1 ? (
          <label class="row small soft slide">
            Step
            <input
              type="range"
              min={0}
              max={times.length - 1}
              value={at}
              aria-valuetext={`${storeLabel(view.stores, group.store)}, mean reward ${figure(step?.reward)}`}
              onInput={(event) => setStep(Number(event.currentTarget.value))}
            />
            <span>
              {storeLabel(view.stores, group.store)}, time {at + 1} of {times.length}
              {step?.policy_step != null && `, sampled by the weights of step ${step.policy_step}`}
            </span>
          </label>
        ) : (
          <span class="small soft">
            {group.steps.length > 1 ? `This report holds one of the ${group.steps.length} times that this example was rolled out.` : "This example was rolled out once."}
          </span>
        )}
        <span class="grow" />
        <ColourChoice value={by} trainer={prepared.trainer} onChange={setColour} />
      </section>
      <section>
        <h2>{plural(tree.siblings.length, "sibling")}, one tree</h2>
        <Prompt group={group} />
        <Tree run={run} tree={prepared.tree} prepared={prepared} by={by} {...(view.configured ? { onFork: choose } : {})} />
        <p class="say">{treeSentence(group)}</p>
        <ColourKey by={by} scales={prepared.scales} trainer={prepared.trainer} tree />
        <p class="say">{basisSentence(tree.basis)}</p>
        {tree.without_tokens.length > 0 && <p class="say">{plural(tree.without_tokens.length, "sibling")} without tokens, so without a branch: see the table below.</p>}
        {group.num_left_out > 0 && <p class="say">{plural(group.num_left_out, "further sibling")} of this group {group.num_left_out === 1 ? "is" : "are"} neither drawn nor in the table.</p>}
        {!view.texts.available && <p class="say">Tokens are shown by their ids: {view.texts.source}</p>}
        {view.configured && view.rescoring && (
          <Resample
            view={view}
            secret={view.rescoring}
            group={group}
            chosen={chosen}
            step={step?.policy_step ?? null}
            onAnswer={(node, fork) => setForks((before) => new Map([...before, [node, fork]]))}
          />
        )}
        {view.rescoring && !view.configured && (
          <p class="say">
            To score this group again, or to go on from a fork with the base model or a kept step, start <code>insitu view config.yml</code> with your own configuration. Nothing that a run directory names is executed, and it holds no key of its backend.
          </p>
        )}
      </section>
      <Siblings run={run} group={group} />
      {view.rescoring && view.configured && view.stores.some((each) => each.name === group.store && each.kind === "training") && <Rescore run={run} secret={view.rescoring} group={group} />}
      {group.steps.length > 1 && (
        <section>
          <h2>The same example as training goes on</h2>
          <Curve
            label="Reward of this example"
            name="mean reward"
            unit="the example's time"
            height={140}
            points={group.steps.map((entry, place) => ({ x: place + 1, value: entry.reward, low: entry.reward_min, high: entry.reward_max }))}
            marks={[]}
          />
          <p class="say">{overTime(group)}</p>
        </section>
      )}
    </>
  );
}

function overTime(group: GroupView): string {
  const rewarded = group.steps.filter((step) => step.reward !== null);
  const first = rewarded[0];
  const last = rewarded[rewarded.length - 1];
  const taught = group.steps.filter((step) => step.num_trained > 0).length;
  if (!first || !last) return "No rollout of this example has a reward.";
  return `Mean reward ${figure(first.reward)} the first time, ${figure(last.reward)} the last; the band is the lowest to the highest sibling. Its group was trained on in ${taught} of ${group.steps.length} times.`;
}

function Prompt({ group }: { group: GroupView }) {
  const { tree } = group;
  const last = tree.prompt[tree.prompt.length - 1];
  const earlier = tree.prompt.slice(0, -1);
  return (
    <>
      {earlier.length > 0 && (
        <details>
          <summary>{plural(earlier.length, "earlier message")}</summary>
          {earlier.map((message, index) => (
            <Message key={index} message={message} />
          ))}
        </details>
      )}
      {last ? <Message message={last} note={`${plural(tree.num_prompt_tokens, "prompt token")}, the same for all`} /> : <Value value={group.input} />}
    </>
  );
}

function treeSentence(group: GroupView): string {
  const { tree } = group;
  const found = forksOf(tree);
  const where = found.first === null ? "All siblings wrote the same tokens." : `Siblings part at ${plural(found.forks, "fork")}, the first ${found.first === 0 ? "at the very beginning" : `after ${plural(found.first, "token")}`} of the answer; each fork is the first token at which they differ.`;
  const expected = group.expected === null || group.expected === undefined ? "" : ` Expected: ${oneLine(typeof group.expected === "string" ? group.expected : JSON.stringify(group.expected), 120)}.`;
  const spread = group.reward === null ? " No sibling has a reward." : ` Mean reward ${figure(group.reward)}, spread ${figure(group.reward_std)}${group.reward_std === 0 ? ": without a spread there is nothing to learn here" : ""}.`;
  return where + expected + spread;
}

interface Prepared extends Grown {
  tokens: ReadonlyMap<number, TreeToken[]>;
  scales: Scales;
  trainer: boolean;
  full: number;
}

function prepare({ tree, added }: Grown): Prepared {
  const places = policyPlaces(tree.nodes.flatMap((node) => node.spans.flatMap((span) => span.policy_steps)));
  const tokens = new Map<number, TreeToken[]>();
  for (const node of drawn(tree.nodes)) {
    const own = tokensOf(node, siblingsThrough(node, tree.branches).length, places);
    const again = added.get(node.id);
    tokens.set(node.id, again ? own.map((token) => ({ ...token, reason: "re-sampled: not trained on, no advantage", policy: `sampled by ${again.fork.version}` })) : own);
  }
  const all = [...tokens.values()].flat();
  return {
    tree,
    added,
    tokens,
    scales: scalesOf(all),
    trainer: hasTrainer(all),
    full: Math.max(1e-9, ...tree.siblings.map((sibling) => Math.abs(sibling.advantage ?? 0))),
  };
}

interface Picked {
  node: number;
  at: number;
}

interface TreeProps {
  run: string;
  tree: TreeView;
  prepared: Prepared;
  by: ColourBy;
  onFork?: (node: TreeNode) => void;
}

function Tree({ run, tree, prepared, by, onFork }: TreeProps) {
  const [picked, setPicked] = useState<Picked | null>(null);
  const [whole, setWhole] = useState<ReadonlySet<number>>(new Set());
  useEffect(() => {
    setPicked(null);
    setWhole(new Set());
  }, [tree]);
  const root = tree.nodes[0];
  // The order in which arrow keys visit tokens: as they are drawn.
  const order = useMemo(() => {
    const out: Picked[] = [];
    for (const node of drawn(tree.nodes)) {
      for (const [first, end] of stretches(node, tree, whole)) for (let at = first; at < end; at += 1) out.push({ node: node.id, at });
    }
    return out;
  }, [tree, whole]);
  if (!root || tree.branches.length === 0) return <p class="notice">No sibling has recorded tokens.</p>;
  const chosen = picked ? prepared.tokens.get(picked.node)?.[picked.at] : undefined;
  const move = (by: number) => {
    const now = picked ? order.findIndex((entry) => entry.node === picked.node && entry.at === picked.at) : by > 0 ? -1 : order.length;
    setPicked(order[Math.max(0, Math.min(order.length - 1, now + by))] ?? null);
  };
  return (
    <>
      <div
        class="tree tokens"
        role="application"
        aria-roledescription="tree of tokens"
        aria-label="Tokens of the siblings. Arrow keys go from token to token."
        tabIndex={0}
        onKeyDown={(event) => {
          if (event.target !== event.currentTarget) return;
          if (event.key === "ArrowRight" || event.key === "ArrowDown") move(1);
          else if (event.key === "ArrowLeft" || event.key === "ArrowUp") move(-1);
          else if (event.key === "Escape") setPicked(null);
          else return;
          event.preventDefault();
        }}
      >
        <ul>
          <Node
            node={root}
            tree={tree}
            run={run}
            prepared={prepared}
            by={by}
            picked={picked}
            whole={whole}
            onPick={setPicked}
            {...(onFork ? { onFork } : {})}
            onWhole={(id) => setWhole((before) => new Set([...before, id]))}
          />
        </ul>
      </div>
      <p class="detail" aria-live="polite">
        {chosen ? (
          <>
            <b class="mono">{visibleToken(chosen.text)}</b> · {describe(chosen)}
            {chosen.numSiblings > 0 && ` · shared by ${plural(chosen.numSiblings, "sibling")}, trained in ${chosen.numTrained}`}
          </>
        ) : (
          "Choose a token, by pointer or arrow keys, for its figures."
        )}
      </p>
    </>
  );
}

/** Which tokens of a node are drawn: not the prompt, and not the middle of a long stretch. */
function stretches(node: TreeNode, tree: TreeView, whole: ReadonlySet<number>): [number, number][] {
  const first = Math.min(node.ids.length, Math.max(0, tree.num_prompt_tokens - node.depth));
  if (whole.has(node.id)) return [[first, node.ids.length]];
  const cut = shortened(first, node.ids.length);
  return cut.left ? [cut.head, cut.tail] : [cut.head];
}

interface NodeProps {
  node: TreeNode;
  tree: TreeView;
  run: string;
  prepared: Prepared;
  by: ColourBy;
  picked: Picked | null;
  whole: ReadonlySet<number>;
  onPick: (picked: Picked) => void;
  onWhole: (id: number) => void;
  onFork?: (node: TreeNode) => void;
}

const LONG = 16;

function Node(props: NodeProps) {
  const { node, tree, run, prepared, by, picked, whole, onPick, onWhole, onFork } = props;
  const again = prepared.added.get(node.id);
  const place = onFork && !again ? placeOf(node, tree) : null;
  const tokens = prepared.tokens.get(node.id) ?? [];
  const parts = stretches(node, tree, whole);
  const shown = parts.reduce((sum, [first, end]) => sum + end - first, 0);
  const [head, tail] = parts;
  const left = head && tail ? tail[0] - head[1] : 0;
  const ending = endingAt(node, tree.branches);
  const children = node.children.flatMap((id) => tree.nodes[id] ?? []);
  const spans = ([first, end]: [number, number]) =>
    tokens
      .slice(first, end)
      .map((token, index) => (
        <TokenSpan
          key={first + index}
          token={token}
          by={by}
          scales={prepared.scales}
          at={picked?.node === node.id && picked.at === first + index}
          onPick={() => onPick({ node: node.id, at: first + index })}
        />
      ));
  return (
    <li class={`${children.length > 0 && (shown > LONG || children.some((child) => child.ids.length > LONG)) ? "below" : ""}${again ? " again" : ""}`}>
      <div class="seg">
        {head && spans(head)}
        {left > 0 && (
          <button type="button" class="more" onClick={() => onWhole(node.id)}>
            … {count(left)} more tokens …
          </button>
        )}
        {tail && spans(tail)}
        {ending.map((branch) => (
          <Leaf key={`${branch.sibling}.${branch.sequence}`} branch={branch} tree={tree} run={run} full={prepared.full} />
        ))}
        {again && (
          <span class="leaf">
            <b>{again.branch.reward === null ? words(again.branch.finish_reason) : figure(again.branch.reward)}</b> re-sampled by {again.fork.step === null ? "the base model" : `step ${again.fork.step}`}
          </span>
        )}
        {onFork && place && (
          <button type="button" class="more" aria-label={`Go on from the fork ${plural(place.depth - tree.num_prompt_tokens, "token")} after the prompt`} onClick={() => onFork(node)}>
            go on …
          </button>
        )}
      </div>
      {children.length > 0 && (
        <ul>
          {children.map((child) => (
            <Node key={child.id} {...props} node={child} />
          ))}
        </ul>
      )}
    </li>
  );
}

function Leaf({ branch, tree, run, full }: { branch: TreeBranch; tree: TreeView; run: string; full: number }) {
  const sibling = tree.siblings[branch.sibling];
  if (!sibling) return null;
  const several = tree.branches.filter((other) => other.sibling === branch.sibling).length > 1;
  return (
    <span class="leaf">
      <b>{sibling.reward === null ? words(sibling.ending) : figure(sibling.reward)}</b>
      <AdvantageBar value={sibling.advantage} full={full} />
      <span class="num">{sibling.advantage === null ? fateLabel(sibling.reason ?? sibling.fate) : signed(sibling.advantage)}</span>
      <a href={href(["runs", run, "rollouts", sibling.rollout_id])} aria-label={`Rollout ${sibling.generation}`}>
        #{sibling.generation}
        {several ? ` part ${branch.sequence + 1}` : ""}
      </a>
    </span>
  );
}

function Siblings({ run, group }: { run: string; group: GroupView }) {
  const full = Math.max(1e-9, ...group.tree.siblings.map((sibling) => Math.abs(sibling.advantage ?? 0)));
  return (
    <section>
      <h2>Siblings</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Siblings">
        <table>
          <thead>
            <tr>
              <th>rollout</th>
              <th class="num">reward</th>
              <th class="num">advantage</th>
              <th>answer</th>
              <th>where it went</th>
            </tr>
          </thead>
          <tbody>
            {group.tree.siblings.map((sibling) => (
              <tr key={sibling.rollout_id}>
                <td>
                  <a href={href(["runs", run, "rollouts", sibling.rollout_id])}>#{sibling.generation}</a>
                </td>
                <td class="num">{figure(sibling.reward)}</td>
                <td class="num nowrap">
                  <AdvantageBar value={sibling.advantage} full={full} /> {signed(sibling.advantage)}
                </td>
                <td>{oneLine(sibling.answer || sibling.failure, 100)}</td>
                <td>
                  {words(sibling.ending)}, {fateLabel(sibling.reason ?? sibling.fate)}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="say">The advantage is how much better or worse than its siblings a rollout did, by the method's own measure: it is what every sampled token of it is pushed by.</p>
    </section>
  );
}
