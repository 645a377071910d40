import { type RefObject } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { parseHash, type Route } from "../route";

/** The width of an element in pixels, followed as it changes: charts are drawn in real pixels, so text keeps its size. */
export function useWidth<T extends Element>(): [RefObject<T | null>, number] {
  const ref = useRef<T>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = ref.current;
    if (!element) return;
    setWidth(Math.floor(element.getBoundingClientRect().width));
    const observer = new ResizeObserver((entries) => {
      for (const entry of entries) setWidth(Math.floor(entry.contentRect.width));
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

export function useRoute(): Route {
  const [route, setRoute] = useState<Route>(() => parseHash(location.hash));
  useEffect(() => {
    const follow = () => setRoute(parseHash(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}

export function useMedia(query: string): boolean {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const list = matchMedia(query);
    const follow = () => setMatches(list.matches);
    list.addEventListener("change", follow);
    follow();
    return () => list.removeEventListener("change", follow);
  }, [query]);
  return matches;
}

export type Loaded<T> = { state: "loading"; value: T | null } | { state: "ready"; value: T } | { state: "failed"; error: Error; value: T | null };

/** Load what `key` names. The last value stays on the page while the next one is on its way. */
export function useLoaded<T>(key: string, load: (signal: AbortSignal) => Promise<T>, again = 0): Loaded<T> {
  const [held, setHeld] = useState<{ key: string; loaded: Loaded<T> }>({ key: "", loaded: { state: "loading", value: null } });
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    const stop = new AbortController();
    latest
      .current(stop.signal)
      .then((value) => {
        if (!stop.signal.aborted) setHeld({ key, loaded: { state: "ready", value } });
      })
      .catch((problem: unknown) => {
        if (stop.signal.aborted) return;
        const error = problem instanceof Error ? problem : new Error(String(problem));
        setHeld((before) => ({ key, loaded: { state: "failed", error, value: before.key === key ? before.loaded.value : null } }));
      });
    return () => stop.abort();
  }, [key, again]);
  return held.key === key ? held.loaded : { state: "loading", value: held.loaded.value };
}
