import { useEffect, useMemo, useState } from "preact/hooks";

import { api, reachable } from "../api";
import { AdvantageBar } from "../charts/AdvantageBar";
import { placesOf, tokensOfCall } from "../calls";
import { fullScale } from "../colour";
import { count, figure, oneLine, plural, seconds, sentence, signed } from "../format";
import { ColourChoice, ColourKey, colourOf, hasTrainer } from "../parts/Colours";
import { useLoaded } from "../parts/hooks";
import { LongText, Message, Value } from "../parts/Message";
import { Pending } from "../parts/Notice";
import { To } from "../parts/To";
import { scalesOf, type Token, TokenFlow } from "../parts/TokenFlow";
import { changed, href, type Route } from "../route";
import type { CallView, RolloutView, RunView } from "../wire";
import { basisSentence, fateLabel, storeLabel, words } from "../words";

const MANY_TURNS = 4;

export function Rollout({ view, route, id }: { view: RunView; route: Route; id: string }) {
  const run = view.run.key;
  const loaded = useLoaded(`${run} ${id}`, (signal) => api.rollout(run, id, signal));
  const rollout = loaded.value;
  if (rollout === null || loaded.state === "failed") return <Pending loaded={loaded} of="The rollout" />;
  const { row } = rollout;
  return (
    <>
      <h1>
        <To parts={["runs", run, "rollouts"]} filters={{ store: row.store }}>
          {storeLabel(view.stores, row.store)}
        </To>{" "}
        ›{" "}
        <To parts={["runs", run, "groups", row.store, row.index]}>
          example {oneLine(row.example_id, 60)}
        </To>{" "}
        › <b>rollout {row.generation}</b>
      </h1>
      <Outcome run={run} rollout={rollout} />
      {rollout.traceback && (
        <section class="verdict bad">
          <h2>What went wrong</h2>
          <p>{rollout.traceback.error || row.failure}</p>
          {rollout.traceback.frames.length > 0 && <LongText text={rollout.traceback.frames.join("\n")} mono />}
          <details>
            <summary>The whole traceback</summary>
            <LongText text={rollout.traceback.text} mono />
          </details>
        </section>
      )}
      <Conversation rollout={rollout} />
      <Tokens view={view} rollout={rollout} route={route} />
    </>
  );
}

function Outcome({ run, rollout }: { run: string; rollout: RolloutView }) {
  const { row, siblings } = rollout;
  const parts = Object.entries(rollout.reward_parts);
  const full = Math.max(...parts.map(([, value]) => Math.abs(value)), 1e-9);
  const best = siblings.filter((sibling) => sibling.reward !== null && row.reward !== null && sibling.reward > row.reward).length;
  return (
    <section>
      <p>
        <b>{sentenceOf(row)}</b>{" "}
        {siblings.length > 1 && row.reward !== null && `${best === 0 ? "No sibling earned more" : `${plural(best, "sibling")} earned more`} (of ${siblings.length} rollouts of this example).`}
      </p>
      <dl class="stat">
        <div>
          <dt>reward</dt>
          <dd>{figure(row.reward)}</dd>
        </div>
        <div>
          <dt>advantage</dt>
          <dd>{signed(row.advantage)}</dd>
        </div>
        <div>
          <dt>calls</dt>
          <dd>{count(row.num_calls)}</dd>
        </div>
        <div>
          <dt>sampled tokens</dt>
          <dd>{count(row.num_output_tokens)}</dd>
        </div>
        <div>
          <dt>time</dt>
          <dd>{seconds(row.seconds)}</dd>
        </div>
        <div>
          <dt>sampled by</dt>
          <dd>{row.policy_steps.length ? `weights of step ${row.policy_steps.join(", ")}` : "–"}</dd>
        </div>
      </dl>
      {parts.length > 0 && (
        <table class="parts">
          <caption class="sr">Parts of the reward</caption>
          <tbody>
            {parts.map(([name, value]) => (
              <tr key={name}>
                <th scope="row">{name}</th>
                <td class="num">{figure(value)}</td>
                <td>
                  <AdvantageBar value={value} full={full} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      <p class="say">{basisSentence(rollout.basis)}</p>
      <div class="cols three">
        <Given title="Input" value={rollout.input} />
        <Given title="Expected" value={rollout.expected} />
        <Given title="Output" value={rollout.output} />
        {rollout.reasoning !== null && <Given title="The evaluator's reasons" value={rollout.reasoning} />}
      </div>
      {siblings.length > 1 && (
        <nav class="siblings" aria-label="Siblings">
          <span class="small soft">Siblings</span>
          {siblings.filter((sibling) => reachable(["runs", run, "rollouts", sibling.rollout_id])).map((sibling) => (
            <a
              key={sibling.rollout_id}
              class={`chip ${sibling.rollout_id === row.rollout_id ? "ok" : ""}`}
              href={href(["runs", run, "rollouts", sibling.rollout_id])}
              {...(sibling.rollout_id === row.rollout_id ? { "aria-current": "page" as const } : {})}
            >
              #{sibling.generation}: {sibling.reward === null ? words(sibling.ending) : figure(sibling.reward)}
            </a>
          ))}
          {reachable(["runs", run, "groups", row.store, row.index]) && (
            <a class="small" href={href(["runs", run, "groups", row.store, row.index])}>
              as a tree
            </a>
          )}
        </nav>
      )}
    </section>
  );
}

function sentenceOf(row: RolloutView["row"]): string {
  const ended = row.failure ? `Failed (${words(row.ending)}): ${oneLine(row.failure, 200)}` : `Ended: ${words(row.ending)}`;
  switch (row.fate) {
    case "trained":
      return `${ended}. Trained on.`;
    case "dropped":
      return `${ended}. Not trained on: ${fateLabel(row.reason ?? "dropped")}.`;
    case "waiting":
      return `${ended}. Its step has not been selected yet.`;
    case "validation":
      return `${ended}. A validation: never trained on.`;
    default:
      return `${ended}. Set aside and run again.`;
  }
}

function Given({ title, value }: { title: string; value: RolloutView["input"] }) {
  return (
    <div>
      <h3 class="soft">{title}</h3>
      <Value value={value} />
    </div>
  );
}

function Conversation({ rollout }: { rollout: RolloutView }) {
  const { calls } = rollout;
  const [open, setOpen] = useState<ReadonlySet<string>>(new Set());
  useEffect(() => {
    const few = calls.length <= MANY_TURNS;
    const ends = [calls[0], calls[calls.length - 1]].flatMap((call) => (call ? [call.id] : []));
    setOpen(new Set(few ? calls.map((call) => call.id) : ends));
  }, [rollout.row.rollout_id]);
  if (calls.length === 0) {
    return (
      <section>
        <h2>Conversation</h2>
        <p>This rollout made no recorded model call{rollout.row.failure ? ": it failed before the first" : ""}.</p>
      </section>
    );
  }
  const all = open.size === calls.length;
  return (
    <section>
      <div class="row">
        <h2 class="plain">Conversation, {plural(calls.length, "model call")}</h2>
        <span class="grow" />
        {calls.length > 1 && (
          <button type="button" class="more" onClick={() => setOpen(all ? new Set() : new Set(calls.map((call) => call.id)))}>
            {all ? "close all" : "open all"}
          </button>
        )}
      </div>
      {calls.map((call, index) => (
        <details
          key={call.id}
          class="turn"
          open={open.has(call.id)}
          onToggle={(event) => {
            const now = event.currentTarget.open;
            setOpen((before) => {
              if (before.has(call.id) === now) return before;
              const next = new Set(before);
              if (now) next.add(call.id);
              else next.delete(call.id);
              return next;
            });
          }}
        >
          <summary>
            Call {index + 1} <span class="small soft">{callSentence(call)}</span>
          </summary>
          {open.has(call.id) && <Turn call={call} />}
        </details>
      ))}
      {rollout.num_calls_left_out > 0 && <p class="say">{plural(rollout.num_calls_left_out, "further call")} did not fit into this page.</p>}
    </section>
  );
}

function callSentence(call: CallView): string {
  const fate = call.fate === "trained" ? `trained, advantage ${signed(call.advantage)}` : call.reason ? `${fateLabel(call.fate)}: ${fateLabel(call.reason)}` : fateLabel(call.fate);
  const by = call.function ? ` in ${call.function}` : "";
  return `${call.policy_version || call.model}${by} · ${count(call.num_prompt_tokens)} + ${count(call.num_output_tokens)} tokens · ended by ${words(call.finish_reason || "nothing")} · ${fate}`;
}

function Turn({ call }: { call: CallView }) {
  return (
    <>
      {call.shared_messages > 0 && <p class="say">Continues an earlier call: {plural(call.shared_messages, "message")} before these are the same.</p>}
      {call.tools && call.tools.length > 0 && (
        <details>
          <summary>{plural(call.tools.length, "tool")} offered</summary>
          <LongText text={JSON.stringify(call.tools, null, 2)} mono />
        </details>
      )}
      {call.messages.map((message, index) => (
        <Message key={index} message={message} />
      ))}
      {call.answer ? (
        <Message message={{ role: "assistant", ...call.answer }} note={call.call_reward === null ? "" : `reward of this call ${signed(call.call_reward)}`} />
      ) : (
        <p class="say">No answer is recorded for this call.</p>
      )}
    </>
  );
}

function Tokens({ view, rollout, route }: { view: RunView; rollout: RolloutView; route: Route }) {
  const by = colourOf(route.query["colour"]);
  const only = Number(route.query["call"] ?? "0");
  const perCall = useMemo(() => {
    const places = placesOf(rollout.calls);
    return rollout.calls.map((call) => tokensOfCall(call, places));
  }, [rollout]);
  const all = useMemo(() => perCall.flat(), [perCall]);
  // The whole group's scale, so that a small advantage looks small beside its siblings'.
  const scales = useMemo(() => {
    const own = scalesOf(all);
    return { ...own, advantage: fullScale([...rollout.siblings.map((sibling) => sibling.advantage), ...all.map((token) => token.advantage)]) };
  }, [all]);
  const trainer = hasTrainer(all);
  const shown: Token[] = only > 0 ? (perCall[only - 1] ?? []) : all;
  const set = (changes: Record<string, string>) => location.replace(changed(route, changes));
  if (rollout.calls.length === 0) return null;
  if (rollout.tokens_problem || all.length === 0) {
    return (
      <section>
        <h2>Tokens</h2>
        <p>{sentence(rollout.tokens_problem) || "No tokens are recorded for this rollout."}</p>
      </section>
    );
  }
  return (
    <section>
      <div class="row">
        <h2 class="plain">{plural(shown.length, "token")}</h2>
        <span class="grow" />
        {perCall.length > 1 && (
          <label class="small soft">
            of{" "}
            <select value={String(only)} onChange={(event) => set({ call: event.currentTarget.value === "0" ? "" : event.currentTarget.value })}>
              <option value="0">all calls</option>
              {perCall.map((tokens, index) => (
                <option key={index} value={String(index + 1)}>
                  call {index + 1} ({count(tokens.length)})
                </option>
              ))}
            </select>
          </label>
        )}
        <ColourChoice value={by} trainer={trainer} onChange={(colour) => set({ colour: colour === "advantage" ? "" : colour })} />
      </div>
      <TokenFlow label="Tokens of the rollout" tokens={shown} by={by} scales={scales} />
      <ColourKey by={by} scales={scales} trainer={trainer} />
      {!view.texts.available && <p class="say">Tokens are shown by their ids: {view.texts.source}</p>}
    </section>
  );
}
