import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

import { words } from "../words";
import { Lane } from "./Lane";

export interface StepSeconds {
  /** The number that the reader knows the step by. */
  number: number;
  seconds: Readonly<Record<string, number>>;
}

/** The phases of one step, chosen by a slider; the last one at first. `say` has the words below it. */
export function StepLane({ steps, phases, say }: { steps: readonly StepSeconds[]; phases: readonly string[]; say: (index: number) => ComponentChildren }) {
  const [chosen, setChosen] = useState<number | null>(null);
  const at = Math.min(chosen ?? steps.length - 1, steps.length - 1);
  const step = steps[at];
  if (!step) return null;
  const shown = phases.filter((name) => (step.seconds[name] ?? 0) > 0).map((name) => ({ name: words(name), seconds: step.seconds[name] ?? 0 }));
  return (
    <section>
      <div class="row">
        <h2 class="plain">Step {step.number}, second by second</h2>
        <span class="grow" />
        {steps.length > 1 && (
          <input
            type="range"
            aria-label="Step"
            aria-valuetext={`step ${step.number}`}
            min={0}
            max={steps.length - 1}
            value={at}
            onInput={(event) => setChosen(Number(event.currentTarget.value))}
          />
        )}
      </div>
      <Lane phases={shown} label={`Phases of step ${step.number}`} />
      {say(at)}
    </section>
  );
}
