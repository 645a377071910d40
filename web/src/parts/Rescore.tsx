import { useEffect, useRef, useState } from "preact/hooks";

import { api, ApiError } from "../api";
import { AdvantageBar } from "../charts/AdvantageBar";
import { figure, oneLine, signed } from "../format";
import { href } from "../route";
import type { GroupView, RescoredGroup, RescoredSibling } from "../wire";
import { fateLabel } from "../words";

type State = { at: "rest" } | { at: "asked" } | { at: "answered"; answer: RescoredGroup } | { at: "failed"; error: Error };

/** Score the recorded rollouts once more, with the reward as it is on disk; the server keeps nothing of it. */
export function Rescore({ run, secret, group }: { run: string; secret: string; group: GroupView }) {
  const [state, setState] = useState<State>({ at: "rest" });
  const asked = useRef<AbortController | null>(null);
  useEffect(() => {
    setState({ at: "rest" });
    return () => asked.current?.abort();
  }, [group]);
  const ask = () => {
    const stop = new AbortController();
    asked.current = stop;
    setState({ at: "asked" });
    api.rescore(run, group.store, group.index, secret, stop.signal).then(
      (answer) => stop.signal.aborted || setState({ at: "answered", answer }),
      (error: unknown) => stop.signal.aborted || setState({ at: "failed", error: error instanceof Error ? error : new Error(String(error)) }),
    );
  };
  return (
    <section aria-busy={state.at === "asked"}>
      <h2>With the reward as it is now</h2>
      <p class="say">Reads the reward's file from disk and scores the recorded rollouts once more. Nothing of the run is changed.</p>
      <p>
        <button type="button" disabled={state.at === "asked"} onClick={ask}>
          {state.at === "asked" ? "Scoring …" : "Score again"}
        </button>
      </p>
      <div aria-live="polite">
        {state.at === "failed" && (
          <div role="alert">
            <p>
              <b>The group could not be scored.</b> {state.error.message}
            </p>
            {state.error instanceof ApiError && state.error.hint && <p class="fix">{state.error.hint}</p>}
          </div>
        )}
        {state.at === "answered" && <Answer run={run} answer={state.answer} />}
      </div>
    </section>
  );
}

function Answer({ run, answer }: { run: string; answer: RescoredGroup }) {
  const full = Math.max(1e-9, ...answer.siblings.flatMap((sibling) => [Math.abs(sibling.advantage ?? 0), Math.abs(sibling.new_advantage ?? 0)]));
  const raised = answer.siblings.filter((sibling) => sibling.error !== null);
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label="Siblings, scored again">
        <table>
          <thead>
            <tr>
              <th>rollout</th>
              <th class="num">reward</th>
              <th class="num">now</th>
              <th class="num">advantage</th>
              <th class="num">now</th>
              <th>it would be</th>
            </tr>
          </thead>
          <tbody>
            {answer.siblings.map((sibling) => (
              <tr key={sibling.rollout_id}>
                <td>
                  <a href={href(["runs", run, "rollouts", sibling.rollout_id])}>#{sibling.generation}</a>
                </td>
                <td class="num">{figure(sibling.reward)}</td>
                <td class="num">{figure(sibling.new_reward)}</td>
                <td class="num">{signed(sibling.advantage)}</td>
                <td class="num nowrap">
                  <AdvantageBar value={sibling.new_advantage} full={full} /> {signed(sibling.new_advantage)}
                </td>
                <td>{fateLabel(sibling.reason ?? sibling.fate)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {raised.map((sibling) => (
        <Raised key={sibling.rollout_id} sibling={sibling} />
      ))}
      <p class="say">
        {changes(answer)} The advantages are those that the trainer would compute.{answer.note && ` Note: ${answer.note}.`}
      </p>
    </>
  );
}

function Raised({ sibling }: { sibling: RescoredSibling }) {
  return (
    <div>
      <p>
        <b>#{sibling.generation}: the reward gave no score.</b> {oneLine(sibling.error ?? "", 500)}
      </p>
      {sibling.frames.length > 0 && <pre>{sibling.frames.join("\n")}</pre>}
    </div>
  );
}

function changes(answer: RescoredGroup): string {
  const changed = answer.siblings.filter((sibling) => sibling.reward !== sibling.new_reward).length;
  return changed === 0 ? `${answer.reward_function} gives every sibling the reward that it had.` : `${answer.reward_function} gives another reward to ${changed} of ${answer.siblings.length}.`;
}
