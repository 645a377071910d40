import { COLOURS, type ColourBy } from "../colour";
import { figure } from "../format";
import { NO_TRAINER } from "../words";
import { Choice } from "./Choice";
import type { Token } from "./TokenFlow";
import type { Scales } from "../colour";

/** The colour in the address, if it is one. */
export function colourOf(text: string | undefined): ColourBy {
  return COLOURS.find((colour) => colour.key === text)?.key ?? "advantage";
}

export function hasTrainer(tokens: Iterable<Token>): boolean {
  for (const token of tokens) if (token.trainer !== null) return true;
  return false;
}

export function ColourChoice({ value, trainer, onChange }: { value: ColourBy; trainer: boolean; onChange: (value: ColourBy) => void }) {
  return (
    <Choice
      label="Colour"
      value={value}
      onChange={onChange}
      options={COLOURS.map((colour) => ({ ...colour, disabled: colour.key === "difference" && !trainer && value !== "difference" }))}
    />
  );
}

/** The sentence that says what the colours mean, with the end of the scale. */
export function ColourKey({ by, scales, trainer, tree = false }: { by: ColourBy; scales: Scales; trainer: boolean; tree?: boolean }) {
  return (
    <>
      <p class="say">{meaning(by, scales, trainer, tree)}</p>
      {!trainer && by !== "difference" && <p class="say">{NO_TRAINER}</p>}
    </>
  );
}

function meaning(by: ColourBy, scales: Scales, trainer: boolean, tree: boolean): string {
  switch (by) {
    case "advantage":
      return `Blue tokens are made likelier by the step, orange ones rarer; full colour is ± ${figure(scales.advantage)}, the largest in the group${tree ? ", summed over the siblings that share a token" : ""}. Hatched tokens are context that nobody trains on, struck ones were dropped, grey ones have no effect.`;
    case "logprob":
      return `The darker, the less likely the sampler found the token it drew; full colour is a logprob of −${figure(scales.logprob)}. Dotted tokens were read, not sampled.`;
    case "difference":
      return trainer ? `Blue where the sampler gave more probability than the trainer, orange where less; full colour is ± ${figure(scales.difference)}. Both should be pale.` : NO_TRAINER;
    case "use":
      return "Coloured tokens are trained on, hatched ones are context, struck ones were sampled and dropped for the reason in their figures, grey ones were sampled where nothing is trained.";
    case "version":
      return "One colour for each version of the weights that sampled. More than one means that weights were published while the agent was at work.";
  }
}
