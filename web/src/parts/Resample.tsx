import { useEffect, useRef, useState } from "preact/hooks";

import { api, ApiError } from "../api";
import { figure, oneLine, plural } from "../format";
import type { Place } from "../tree";
import type { GroupView, ResampledFork, RunView } from "../wire";

/** The fork to go on from. */
export interface Chosen {
  node: number;
  place: Place;
  /** Tokens between the prompt and it. */
  after: number;
}

type State = { at: "rest" } | { at: "asked" } | { at: "answered"; answer: ResampledFork } | { at: "failed"; error: Error };

interface Props {
  view: RunView;
  secret: string;
  group: GroupView;
  chosen: Chosen | null;
  /** The weights that made the group; null if they are several, or unknown. */
  step: number | null;
  onAnswer: (node: number, fork: ResampledFork) => void;
}

const BASE = "base";
const MOST_AT_ONCE = 8;
const MOST_TOKENS = 4096;
const MOST_LISTED = 200;
/** Differences of log-probabilities beyond this are more than rounding and batching explain. */
const ALIKE = 0.1;

/** Sample further answers from a fork; the server keeps nothing of it. */
export function Resample({ view, secret, group, chosen, step, onAnswer }: Props) {
  const [state, setState] = useState<State>({ at: "rest" });
  const [model, setModel] = useState(step ? String(step) : BASE);
  const [count, setCount] = useState(4);
  const [maxTokens, setMaxTokens] = useState(256);
  const asked = useRef<AbortController | null>(null);
  const first = useRef<HTMLSelectElement>(null);
  useEffect(() => {
    setModel(step ? String(step) : BASE);
  }, [group]);
  useEffect(() => {
    setState({ at: "rest" });
    if (chosen) first.current?.focus();
    return () => asked.current?.abort();
  }, [chosen]);
  if (!chosen) return <p class="say">Choose “go on …” at a fork to sample further answers from there, by the base model or any kept step.</p>;
  const ask = () => {
    const stop = new AbortController();
    asked.current?.abort();
    asked.current = stop;
    setState({ at: "asked" });
    const { rollout, sequence, depth } = chosen.place;
    api.resample(view.run.key, group.store, group.index, { rollout, sequence, depth, step: model === BASE ? null : model, count, max_tokens: maxTokens }, secret, stop.signal).then(
      (answer) => {
        if (stop.signal.aborted) return;
        setState({ at: "answered", answer });
        onAnswer(chosen.node, answer);
      },
      (error: unknown) => stop.signal.aborted || setState({ at: "failed", error: error instanceof Error ? error : new Error(String(error)) }),
    );
  };
  return (
    <div class="goon" aria-busy={state.at === "asked"}>
      <h3>Go on from the fork {chosen.after > 0 ? `${plural(chosen.after, "token")} after the prompt` : "right after the prompt"}</h3>
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          ask();
        }}
      >
        <label class="row small soft">
          With
          <select ref={first} value={model} onChange={(event) => setModel(event.currentTarget.value)}>
            <option value={BASE}>the base model</option>
            <option value="0">step 0, where the run started</option>
            {stepsOf(view).map((each) => (
              <option key={each} value={String(each)}>
                step {each}
              </option>
            ))}
          </select>
        </label>
        <label class="row small soft">
          answers
          <input type="number" min={1} max={MOST_AT_ONCE} required value={count} onInput={(event) => setCount(event.currentTarget.valueAsNumber)} />
        </label>
        <label class="row small soft">
          of at most
          <input type="number" min={1} max={MOST_TOKENS} required value={maxTokens} onInput={(event) => setMaxTokens(event.currentTarget.valueAsNumber)} />
          tokens
        </label>
        <button type="submit" disabled={state.at === "asked"}>
          {state.at === "asked" ? "Sampling …" : "Sample"}
        </button>
      </form>
      <div aria-live="polite">
        {state.at === "failed" && (
          <div role="alert">
            <p>
              <b>Nothing was sampled.</b> {state.error.message}
            </p>
            {state.error instanceof ApiError && state.error.hint && <p class="fix">{state.error.hint}</p>}
          </div>
        )}
        {state.at === "answered" && <Answer answer={state.answer} />}
      </div>
    </div>
  );
}

/** The steps of the run, newest first. The backend says which of them it has kept. */
function stepsOf(view: RunView): number[] {
  const steps = new Set(view.points.flatMap((point) => (point.step ? [point.step] : [])));
  return [...steps].sort((a, b) => b - a).slice(0, MOST_LISTED);
}

function Answer({ answer }: { answer: ResampledFork }) {
  const raised = answer.branches.find((branch) => branch.error !== null);
  return (
    <>
      <p class="say">
        {plural(answer.branches.length, "answer")} by {oneLine(answer.version || answer.model, 80)}, drawn in the tree with a dashed line. They go on from exactly the {plural(answer.depth, "token")} before the fork, by the gateway's record; they are not trained on and have no advantage. {scored(answer)}
      </p>
      {answer.note && <p class="say">{answer.note}</p>}
      {answer.reward_note && <p class="say">{answer.reward_note}</p>}
      {raised && (
        <p>
          <b>The reward gave no score.</b> {oneLine(raised.error ?? "", 500)}
        </p>
      )}
    </>
  );
}

function scored(answer: ResampledFork): string {
  if (answer.score_gap === null) return "";
  if (answer.score_gap <= ALIKE) return `Scored again after these tokens, what the siblings wrote next is as likely as in the record (difference ${figure(answer.score_gap)}).`;
  return `Scored again after these tokens, what the siblings wrote next differs by ${figure(answer.score_gap)} from the record: this engine does not compute what it did then.`;
}
