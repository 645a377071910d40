import { useState } from "preact/hooks";

import { figure } from "../format";
import { useWidth } from "../parts/hooks";
import { lines, place } from "../scale";

interface Props {
  label: string;
  unit: string;
  say: string;
  xs: readonly number[];
  values: readonly (number | null)[];
  show?: (value: number | null) => string;
}

/** One small series with its last value. A series without a figure says so. */
export function Spark({ label, unit, say, xs, values, show = figure }: Props) {
  const [ref, width] = useWidth<HTMLDivElement>();
  const [at, setAt] = useState<number | null>(null);
  const known = values.filter((value): value is number => value !== null && Number.isFinite(value));
  // Steps that trained nothing have no figure; the line goes on to the next that has one.
  const kept = values.flatMap((value, index) => (value !== null && Number.isFinite(value) ? [index] : []));
  const low = Math.min(...known);
  const high = Math.max(...known);
  const first = xs[0] ?? 0;
  const last = xs[xs.length - 1] ?? 1;
  const px = (x: number) => place(x, first, last, 3, width - 3);
  const latest = known.length ? (known[known.length - 1] as number) : null;
  const chosen = at === null ? null : (values[at] ?? null);
  return (
    <div class="card tile">
      <div class="top">
        <span>{at === null ? label : `${unit} ${xs[at] ?? ""}`}</span>
        <b>{show(at === null ? latest : chosen)}</b>
      </div>
      <div ref={ref}>
        {width > 0 && known.length > 0 && (
          <svg
            height={48}
            viewBox={`0 0 ${width} 48`}
            role="img"
            aria-label={`${label}: from ${show(known[0] as number)} to ${show(latest)}, lowest ${show(low)}, highest ${show(high)}`}
            onPointerLeave={() => setAt(null)}
            onPointerMove={(event) => {
              const box = event.currentTarget.getBoundingClientRect();
              const x = place(event.clientX - box.left, 3, width - 3, first, last);
              let nearest = 0;
              xs.forEach((candidate, index) => {
                if (Math.abs(candidate - x) < Math.abs((xs[nearest] as number) - x)) nearest = index;
              });
              setAt(nearest);
            }}
          >
            <rect class="hit" x={0} y={0} width={width} height={48} />
            {lines(kept.map((index) => px(xs[index] ?? 0)), kept.map((index) => place(values[index] as number, low, high, 43, 6))).map((part) =>
              part.includes(" ") ? <polyline key={part} class="sp" points={part} /> : <circle key={part} class="dot" r={2.5} cx={part.split(",")[0]} cy={part.split(",")[1]} />,
            )}
            {at !== null && <line class="cursor" x1={px(xs[at] ?? 0)} x2={px(xs[at] ?? 0)} y1={2} y2={46} />}
          </svg>
        )}
      </div>
      <p class="say">{known.length ? say : "This run recorded no such figure."}</p>
    </div>
  );
}
