// The arithmetic of long lists. Pure functions.

export interface Window {
  first: number;
  /** One past the last. */
  end: number;
}

/** Which rows of equal height are in sight, with some more on both sides. */
export function rowsInSight(scrolled: number, height: number, rowHeight: number, rows: number, spare = 8): Window {
  const first = Math.max(0, Math.min(rows, Math.floor(scrolled / rowHeight) - spare));
  const end = Math.max(first, Math.min(rows, Math.ceil((scrolled + height) / rowHeight) + spare));
  return { first, end };
}

/** Whether the next page must be on its way so that the reader does not reach the end of what is loaded. */
export function wantsMore(inSight: Window, loaded: number, hasMore: boolean, ahead = 40): boolean {
  return hasMore && inSight.end + ahead >= loaded;
}

/** Pieces of at most `size`, as index ranges. */
export function chunks(total: number, size: number): Window[] {
  const out: Window[] = [];
  for (let first = 0; first < total; first += size) out.push({ first, end: Math.min(total, first + size) });
  return out;
}

/** Add a page to the rows; one that is there already (a page asked for twice) is not added again. */
export function joined<T>(rows: readonly T[], page: readonly T[], key: (row: T) => string): T[] {
  const known = new Set(rows.map(key));
  return [...rows, ...page.filter((row) => !known.has(key(row)))];
}

/** At most `limit` bins over neighbouring entries, each at least one entry wide. */
export function bins(total: number, limit: number): Window[] {
  return chunks(total, Math.max(1, Math.ceil(total / limit)));
}
