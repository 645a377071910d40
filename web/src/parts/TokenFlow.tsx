import { type ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { type ColourBy, fullScale, type Scales, shade, type TokenFigures } from "../colour";
import { figure, signed, visibleToken } from "../format";
import { chunks, type Window } from "../paging";

/** A token with what is known of it; null: not recorded. */
export interface Token extends TokenFigures {
  id: number;
  text: string;
  /** Why it is not trained on; empty otherwise. */
  reason: string;
  /** The policy that sampled it, as it is called. */
  policy: string;
}

const CHUNK = 256;

export function scalesOf(tokens: Iterable<Token>): Scales {
  const all = [...tokens];
  return {
    advantage: fullScale(all.map((token) => token.advantage)),
    logprob: Math.max(1, fullScale(all.map((token) => token.logprob))),
    difference: fullScale(all.map((token) => (token.logprob === null || token.trainer === null ? null : token.logprob - token.trainer))),
  };
}

interface SpanProps {
  token: Token;
  by: ColourBy;
  scales: Scales;
  id?: string;
  at?: boolean;
  mark?: boolean;
  onPick?: () => void;
}

export function TokenSpan({ token, by, scales, id, at = false, mark = false, onPick }: SpanProps) {
  const { classes } = shade(by, token, scales);
  return (
    <>
      <span {...(id ? { id } : {})} class={`t ${classes}${at ? " at" : ""}${mark ? " first" : ""}`} title={describe(token)} {...(onPick ? { onClick: onPick } : {})}>
        {visibleToken(token.text)}
      </span>
      {token.text.includes("\n") ? <br /> : <wbr />}
    </>
  );
}

/** Everything that is known of a token, as one line. */
export function describe(token: Token): string {
  const parts = [`id ${token.id}`];
  if (token.use === "context") parts.push("context, not trained on");
  else if (token.use === "sampled") parts.push(token.reason || "sampled, not for training");
  else if (token.use === "dropped") parts.push(`dropped${token.reason ? `: ${token.reason}` : ""}`);
  else parts.push(token.advantage === null ? "advantage not recorded" : `advantage ${signed(token.advantage)}`);
  if (token.logprob !== null) {
    parts.push(`logprob ${figure(token.logprob)} (${figure(Math.exp(token.logprob) * 100)} %)`);
    parts.push(token.trainer === null ? "trainer's logprob not recorded" : `sampler − trainer ${signed(token.logprob - token.trainer, 4)}`);
  }
  if (token.policy) parts.push(token.policy);
  return parts.join(" · ");
}

interface Props {
  label: string;
  tokens: readonly Token[];
  by: ColourBy;
  scales: Scales;
  /** The token at which two sequences begin to differ. */
  mark?: number | null;
}

/**
 * Tokens in reading order. Only the pieces near the screen are in the document: a piece that leaves keeps its height.
 *
 * With the keyboard: arrows move from token to token, Home and End to the ends, Page Up and Down by fifty.
 */
export function TokenFlow({ label, tokens, by, scales, mark = null }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const [at, setAt] = useState<number | null>(null);
  const pieces = useMemo(() => chunks(tokens.length, CHUNK), [tokens]);
  const prefix = useMemo(() => `t${Math.random().toString(36).slice(2, 8)}`, []);
  const chosen = at === null ? undefined : tokens[at];
  useEffect(() => setAt(null), [tokens]);
  useLayoutEffect(() => {
    const parent = box.current;
    const element = at === null ? null : document.getElementById(`${prefix}-${at}`);
    if (!parent || !element) return;
    const inner = element.getBoundingClientRect();
    const outer = parent.getBoundingClientRect();
    if (inner.top < outer.top) parent.scrollTop -= outer.top - inner.top + 30;
    else if (inner.bottom > outer.bottom) parent.scrollTop += inner.bottom - outer.bottom + 30;
  }, [at]);
  const keys: Record<string, (now: number) => number> = {
    ArrowRight: (now) => now + 1,
    ArrowLeft: (now) => now - 1,
    ArrowDown: (now) => now + 10,
    ArrowUp: (now) => now - 10,
    PageDown: (now) => now + 50,
    PageUp: (now) => now - 50,
    Home: () => 0,
    End: () => tokens.length - 1,
  };
  if (tokens.length === 0) return <p class="notice">No tokens were recorded here.</p>;
  return (
    <>
      <div
        ref={box}
        class="tokens box"
        role="application"
        aria-roledescription="tokens"
        aria-label={`${label}, ${tokens.length} tokens. Arrow keys go from token to token.`}
        tabIndex={0}
        onKeyDown={(event) => {
          const go = keys[event.key];
          if (!go || event.ctrlKey || event.metaKey || event.altKey) return;
          event.preventDefault();
          setAt((now) => Math.max(0, Math.min(tokens.length - 1, go(now ?? -1))));
        }}
      >
        {pieces.map((piece) => (
          <Piece key={piece.first} root={box} piece={piece} forced={at !== null && at >= piece.first && at < piece.end}>
            {() =>
              tokens
                .slice(piece.first, piece.end)
                .map((token, index) => (
                  <TokenSpan
                    key={index}
                    id={`${prefix}-${piece.first + index}`}
                    token={token}
                    by={by}
                    scales={scales}
                    at={at === piece.first + index}
                    mark={mark === piece.first + index}
                    onPick={() => setAt(piece.first + index)}
                  />
                ))
            }
          </Piece>
        ))}
      </div>
      <p class="detail" aria-live="polite">
        {chosen ? (
          <>
            Token {(at as number) + 1} of {tokens.length}: <b class="mono">{visibleToken(chosen.text)}</b> · {describe(chosen)}
          </>
        ) : (
          "Choose a token, by pointer or arrow keys, for its figures."
        )}
      </p>
    </>
  );
}

function Piece({ root, piece, forced, children }: { root: { current: HTMLElement | null }; piece: Window; forced: boolean; children: () => ComponentChildren }) {
  const ref = useRef<HTMLDivElement>(null);
  const [near, setNear] = useState(piece.first === 0);
  const [height, setHeight] = useState(((piece.end - piece.first) / 11) * 26);
  useEffect(() => {
    const element = ref.current;
    if (!element) return;
    const observer = new IntersectionObserver(
      (entries) => {
        const entry = entries[entries.length - 1];
        if (!entry) return;
        if (!entry.isIntersecting && entry.boundingClientRect.height > 0) setHeight(entry.boundingClientRect.height);
        setNear(entry.isIntersecting);
      },
      { root: root.current, rootMargin: "800px 0px" },
    );
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const shown = near || forced;
  return (
    <div ref={ref} style={shown ? { display: "inline" } : { height: `${height}px` }}>
      {shown ? children() : null}
    </div>
  );
}
