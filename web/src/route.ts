// Addresses: everything that a page shows is in the hash, so that a link shows the same to somebody else.

export type Query = Readonly<Record<string, string>>;

export interface Route {
  /** Decoded parts of the path: ["runs", "adder", "rollouts"]. */
  parts: readonly string[];
  query: Query;
}

export function parseHash(hash: string): Route {
  const text = hash.replace(/^#/, "");
  const [path = "", search = ""] = splitOnce(text, "?");
  const parts = path.split("/").filter(Boolean).map(decode);
  const query: Record<string, string> = Object.create(null) as Record<string, string>;
  for (const [key, value] of new URLSearchParams(search)) query[key] = value;
  return { parts, query };
}

export function href(parts: readonly (string | number)[], query: Readonly<Record<string, string | number | null | undefined>> = {}): string {
  const path = parts.map((part) => encodeURIComponent(String(part))).join("/");
  const search = new URLSearchParams();
  for (const key of Object.keys(query).sort()) {
    const value = query[key];
    if (value !== null && value !== undefined && value !== "") search.set(key, String(value));
  }
  const tail = search.toString();
  return `#/${path}${tail ? `?${tail}` : ""}`;
}

/** The same page with some of its filters changed; an empty value removes one. */
export function changed(route: Route, changes: Readonly<Record<string, string | number | null | undefined>>): string {
  return href(route.parts, { ...route.query, ...changes });
}

function splitOnce(text: string, mark: string): [string, string] {
  const at = text.indexOf(mark);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // A stray percent sign typed by hand.
  }
}
