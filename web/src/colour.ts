// Which colour a token gets. Pure functions: the result is class names, because the pages carry no style attributes.

export type ColourBy = "advantage" | "logprob" | "difference" | "use" | "version";

export const COLOURS: readonly { key: ColourBy; label: string }[] = [
  { key: "advantage", label: "advantage" },
  { key: "logprob", label: "logprob" },
  { key: "difference", label: "sampler − trainer" },
  { key: "use", label: "trained / context" },
  { key: "version", label: "version" },
];

export const LEVELS = 8;

/** Level 0 to LEVELS of a magnitude; a square root spreads the small ones, which are most. */
export function level(value: number, full: number): number {
  if (!Number.isFinite(value) || full <= 0) return 0;
  const share = Math.min(1, Math.abs(value) / full);
  return Math.round(Math.sqrt(share) * LEVELS);
}

/** The largest magnitude, for a scale that the page names; 1 where nothing differs from zero. */
export function fullScale(values: Iterable<number | null | undefined>): number {
  let full = 0;
  for (const value of values) if (value != null && Number.isFinite(value)) full = Math.max(full, Math.abs(value));
  return full || 1;
}

export interface Shade {
  /** Classes of the token's element. */
  classes: string;
  /** Whether the figure asked for is there at all. */
  known: boolean;
}

export interface TokenFigures {
  advantage: number | null;
  logprob: number | null;
  trainer: number | null;
  /** "trained", "context", "dropped", or "sampled" where nothing is trained on, as in a validation. */
  use: string;
  /** Which of the versions in the rollout, in the order of their appearance. */
  version: number | null;
}

export interface Scales {
  advantage: number;
  logprob: number;
  difference: number;
}

export function diverging(value: number, full: number): string {
  if (value === 0) return "nul";
  return `${value > 0 ? "pos" : "neg"} k${level(value, full)}`;
}

export function shade(by: ColourBy, token: TokenFigures, scales: Scales): Shade {
  const absent: Shade = { classes: "none", known: false };
  switch (by) {
    case "advantage":
      if (token.use === "context") return { classes: "ctx", known: true };
      if (token.use === "dropped") return { classes: "drop", known: true };
      if (token.use === "sampled") return { classes: "nul", known: true };
      return token.advantage === null ? absent : { classes: diverging(token.advantage, scales.advantage), known: true };
    case "logprob":
      return token.logprob === null
        ? absent
        : { classes: `rare k${level(token.logprob, scales.logprob)}`, known: true };
    case "difference": {
      if (token.logprob === null || token.trainer === null) return absent;
      return { classes: diverging(token.logprob - token.trainer, scales.difference), known: true };
    }
    case "use":
      if (token.use === "trained") return { classes: "used", known: true };
      if (token.use === "sampled") return { classes: "nul", known: true };
      return { classes: token.use === "dropped" ? "drop" : "ctx", known: true };
    case "version":
      return token.version === null ? absent : { classes: `v${token.version % 6}`, known: true };
  }
}
