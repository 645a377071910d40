// Follow a run by server-sent events. EventSource gives up when the server answers with an error, as it does
// while it restarts, so the connection is opened again here, later each time, from the last event that arrived.

import { useEffect, useRef, useState } from "preact/hooks";

import { api } from "./api";
import type { RunEvent } from "./wire";

export type LiveState = "off" | "connecting" | "live" | "waiting";

const KINDS = ["rollouts", "changed", "step", "validated", "submitted", "epoch", "best", "failed", "ended"];

/** Milliseconds before the n-th attempt: doubled each time, at most 15 s. */
export function pause(attempt: number): number {
  return Math.min(15_000, 500 * 2 ** Math.min(attempt, 10));
}

export function useLive(run: string, cursor: string | null, active: boolean, onEvent: (event: RunEvent) => void): LiveState {
  const [state, setState] = useState<LiveState>("off");
  const handler = useRef(onEvent);
  handler.current = onEvent;
  const last = useRef<string>("");
  const known = cursor !== null;
  useEffect(() => {
    if (!active || cursor === null) {
      setState("off");
      return;
    }
    last.current = cursor;
    let source: EventSource | null = null;
    let timer = 0;
    let attempt = 0;
    let over = false;
    const open = () => {
      setState(attempt ? "waiting" : "connecting");
      source = new EventSource(api.events(run, last.current));
      source.onopen = () => {
        attempt = 0;
        setState("live");
      };
      source.onerror = () => {
        source?.close();
        if (over) return;
        setState("waiting");
        timer = window.setTimeout(open, pause(attempt));
        attempt += 1;
      };
      for (const kind of KINDS) {
        source.addEventListener(kind, (event: MessageEvent<string>) => {
          if (event.lastEventId) last.current = event.lastEventId;
          let data: RunEvent;
          try {
            data = JSON.parse(event.data) as RunEvent;
          } catch {
            return; // Half an event of a server that was killed; the next connection repeats it.
          }
          handler.current({ ...data, kind });
          if (kind === "ended") {
            over = true;
            source?.close();
            setState("off");
          }
        });
      }
    };
    open();
    return () => {
      over = true;
      clearTimeout(timer);
      source?.close();
    };
  }, [run, active, known]);
  return state;
}
