// Numbers and texts as people read them. Pure functions.

const MINUS = "−";

/** A figure with three significant digits, never "NaN": an absent value is an en dash. */
export function figure(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text: string;
  if (size < 1e-4 || size >= 1e7) text = size.toExponential(1).replace("e-", `e${MINUS}`).replace("e+", "e");
  else if (size >= 1000) text = Math.round(size).toLocaleString("en-US");
  else text = trimZeros(size.toPrecision(digits));
  return value < 0 ? MINUS + text : text;
}

/** Like `figure`, with an explicit plus: advantages and differences. */
export function signed(value: number | null | undefined, decimals = 2): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const text = Math.abs(value).toFixed(decimals);
  if (Number(text) === 0) {
    const size = Math.abs(value);
    return size === 0 ? "0" : (value < 0 ? MINUS : "+") + size.toExponential(0).replace("e-", `e${MINUS}`);
  }
  return (value < 0 ? MINUS : "+") + text;
}

function trimZeros(text: string): string {
  if (!text.includes(".") || text.includes("e")) return text;
  return text.replace(/\.?0+$/, "");
}

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 1) return "< 1 %";
  return `${Math.round(value)} %`;
}

/** A size in bytes: "12.4 GiB". */
export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  let size = value;
  while (size >= 1024 && place < units.length - 1) {
    size /= 1024;
    place += 1;
  }
  return `${place === 0 ? size : size.toFixed(1)} ${units[place]}`;
}

/** "3 rollouts", "1 rollout". */
export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

/** A point in time (seconds since 1970) relative to now. */
export function ago(time: number | null | undefined, now: number): string {
  if (time === null || time === undefined) return "–";
  const gone = Math.max(0, now - time);
  if (gone < 5) return "just now";
  if (gone < 90) return `${Math.round(gone)} s ago`;
  if (gone < 5400) return `${Math.round(gone / 60)} min ago`;
  if (gone < 129600) return `${Math.round(gone / 3600)} h ago`;
  return `${Math.round(gone / 86400)} days ago`;
}

/** Words from a record as a sentence: a capital letter and a full stop. */
export function sentence(text: string): string {
  if (text === "") return "";
  return text.slice(0, 1).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** One line of a longer text, for tables. */
export function oneLine(text: string, limit = 160): string {
  const flat = text.replace(/\s+/g, " ").trim();
  const points = [...flat];
  return points.length <= limit ? flat : `${points.slice(0, limit - 1).join("")}…`;
}

/** A token as it is shown: spaces and line breaks become visible, control characters become their pictures. */
export function visibleToken(text: string): string {
  if (text === "") return "∅";
  let shown = "";
  for (const point of text) {
    if (point === "\n") shown += "⏎";
    else if (point === "\t") shown += "⇥";
    else if (point === " ") shown += "·";
    else {
      const code = point.codePointAt(0) ?? 0;
      if (code < 32) shown += String.fromCodePoint(0x2400 + code);
      else if (code === 127) shown += "␡";
      // Zero-width and bidirectional controls would hide or reorder what stands beside them.
      else if ((code >= 0x200b && code <= 0x200f) || (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069) || code === 0xfeff)
        shown += `[${code.toString(16)}]`;
      else shown += point;
    }
  }
  return shown;
}
