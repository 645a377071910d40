// A report: the answers that its pages ask for are in the file itself, by address.

interface Kept {
  answers: Readonly<Record<string, unknown>>;
  /** The run that the report is of. */
  run: string;
  /** How much of the run is in the file, and how to see the rest. */
  notice: string;
}

const element = typeof document === "undefined" ? null : document.getElementById("kept"); // none in a unit test

/** Null where a server answers. */
export const kept: Kept | null = element?.textContent ? (JSON.parse(element.textContent) as Kept) : null;
