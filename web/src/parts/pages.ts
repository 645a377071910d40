import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import { joined } from "../paging";

interface Held<P, T> {
  key: string;
  first: P | null;
  rows: T[];
  next: string | null;
  loading: boolean;
  error: Error | null;
}

/** Pages by cursor, one after the other; another `key` starts again from the first. */
export function usePages<P extends { next: string | null }, T>(
  key: string,
  load: (cursor: string | null, signal: AbortSignal) => Promise<P>,
  rowsOf: (page: P) => readonly T[],
  idOf: (row: T) => string,
): Held<P, T> & { more: () => void } {
  const [held, setHeld] = useState<Held<P, T>>({ key, first: null, rows: [], next: null, loading: true, error: null });
  const busy = useRef<AbortController | null>(null);
  const fetchPage = useCallback(
    (cursor: string | null) => {
      const stop = new AbortController();
      busy.current = stop;
      setHeld((before) => ({ ...before, loading: true, error: null }));
      load(cursor, stop.signal)
        .then((page) => {
          if (stop.signal.aborted) return;
          busy.current = null;
          setHeld((before) => ({
            key,
            first: cursor === null ? page : before.first,
            rows: cursor === null ? [...rowsOf(page)] : joined(before.rows, rowsOf(page), idOf),
            next: page.next,
            loading: false,
            error: null,
          }));
        })
        .catch((problem: unknown) => {
          if (stop.signal.aborted) return;
          busy.current = null;
          const error = problem instanceof Error ? problem : new Error(String(problem));
          setHeld((before) => ({ ...before, loading: false, error, ...(cursor === null ? { key, rows: [], next: null } : {}) }));
        });
    },
    [key],
  );
  useEffect(() => {
    fetchPage(null);
    return () => busy.current?.abort();
  }, [fetchPage]);
  const { next } = held;
  const more = () => {
    if (next !== null && busy.current === null) fetchPage(next);
  };
  return { ...held, more };
}
