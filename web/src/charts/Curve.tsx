import { useState } from "preact/hooks";

import { figure } from "../format";
import { useWidth } from "../parts/hooks";
import { axis, lines, place, wholeTicks } from "../scale";

export interface Point {
  x: number;
  value: number | null;
  low: number | null;
  high: number | null;
}

interface Props {
  label: string;
  unit: string;
  points: readonly Point[];
  /** Measurements with an interval, such as validation rewards. */
  marks: readonly Point[];
  /** The name of the line's value in the readout. */
  name?: string;
  height?: number;
}

const LEFT = 38;
const RIGHT = 14;
const TOP = 10;
const BOTTOM = 22;

/** A line with its spread, and marks with their intervals; arrow keys and the pointer read single values. */
export function Curve({ label, unit, points, marks, name = "training", height = 210 }: Props) {
  const [ref, width] = useWidth<HTMLDivElement>();
  const [at, setAt] = useState<number | null>(null);
  const all = [...points, ...marks];
  const xs = [...new Set(all.map((point) => point.x))].sort((a, b) => a - b);
  const first = xs[0] ?? 0;
  const last = xs[xs.length - 1] ?? 1;
  const y = axis(all.flatMap((point) => [point.value, point.low, point.high]), 5);
  const px = (value: number) => place(value, first, last, LEFT, width - RIGHT);
  const py = (value: number) => place(value, y.low, y.high, height - BOTTOM, TOP);
  const banded = points.filter((point) => point.low !== null && point.high !== null);
  const band = [
    ...banded.map((point) => `${px(point.x).toFixed(1)},${py(point.high as number).toFixed(1)}`),
    ...[...banded].reverse().map((point) => `${px(point.x).toFixed(1)},${py(point.low as number).toFixed(1)}`),
  ].join(" ");
  const measured = marks.filter((mark) => mark.value !== null);
  const cursor = at === null ? null : xs[at];
  const move = (step: number) => setAt((now) => Math.max(0, Math.min(xs.length - 1, (now ?? (step > 0 ? -1 : xs.length)) + step)));
  const follow = (event: PointerEvent) => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const value = place(event.clientX - box.left, LEFT, width - RIGHT, first, last);
    let nearest = 0;
    xs.forEach((x, index) => {
      if (Math.abs(x - value) < Math.abs((xs[nearest] as number) - value)) nearest = index;
    });
    setAt(xs.length ? nearest : null);
  };
  const ticks = wholeTicks(first, last, Math.max(2, Math.floor(width / 90)));
  return (
    <div
      class="figure"
      ref={ref}
      role="application"
      aria-roledescription="chart"
      tabIndex={0}
      aria-label={`${label}. Arrow keys read single values.`}
      onKeyDown={(event) => {
        if (event.key === "ArrowRight") move(1);
        else if (event.key === "ArrowLeft") move(-1);
        else if (event.key === "Escape") setAt(null);
        else return;
        event.preventDefault();
      }}
    >
      {width > 0 && (
        <svg height={height} viewBox={`0 0 ${width} ${height}`} aria-hidden="true" onPointerMove={follow} onPointerLeave={() => setAt(null)}>
          <rect class="hit" x={0} y={0} width={width} height={height} />
          {y.ticks.map((tick) => (
            <g key={tick}>
              <line class="grid" x1={LEFT} x2={width - RIGHT} y1={py(tick)} y2={py(tick)} />
              <text x={LEFT - 6} y={py(tick) + 4} text-anchor="end">
                {figure(tick)}
              </text>
            </g>
          ))}
          {ticks.map((tick) => (
            <text key={`x${tick}`} x={px(tick)} y={height - 6} text-anchor={tick === last ? "end" : "middle"}>
              {tick === last ? `${unit} ${tick}` : tick}
            </text>
          ))}
          {band && <polygon class="band" points={band} />}
          {lines(points.map((point) => px(point.x)), points.map((point) => (point.value === null ? null : py(point.value)))).map((part) =>
            part.includes(" ") ? <polyline key={part} class="mean" points={part} /> : <circle key={part} class="dot" r={3} cx={part.split(",")[0]} cy={part.split(",")[1]} />,
          )}
          <polyline class="vline" points={measured.map((mark) => `${px(mark.x).toFixed(1)},${py(mark.value as number).toFixed(1)}`).join(" ")} />
          {measured.map((mark) => (
            <g key={`m${mark.x}`}>
              {mark.low !== null && mark.high !== null && <line class="err" x1={px(mark.x)} x2={px(mark.x)} y1={py(mark.low)} y2={py(mark.high)} />}
              <circle class="val" r={4} cx={px(mark.x)} cy={py(mark.value as number)} />
            </g>
          ))}
          {cursor !== null && cursor !== undefined && <line class="cursor" x1={px(cursor)} x2={px(cursor)} y1={TOP} y2={height - BOTTOM} />}
        </svg>
      )}
      <p class="readout" aria-live="polite">
        {xs.length > 0 && <Values x={cursor ?? last} unit={unit} name={name} points={points} marks={marks} />}
      </p>
    </div>
  );
}

function Values({ x, unit, name, points, marks }: { x: number; unit: string; name: string; points: readonly Point[]; marks: readonly Point[] }) {
  const point = points.find((candidate) => candidate.x === x);
  const mark = marks.find((candidate) => candidate.x === x);
  return (
    <>
      {unit} <b>{x}</b>
      {point && point.value !== null && (
        <>
          : {name} <b>{figure(point.value)}</b>
          {point.low !== null && point.high !== null && ` (${figure(point.low)} to ${figure(point.high)})`}
        </>
      )}
      {mark && mark.value !== null && (
        <>
          {point ? ", " : ": "}held out <b>{figure(mark.value)}</b>
          {mark.low !== null && mark.high !== null && ` (${figure(mark.low)} to ${figure(mark.high)})`}
        </>
      )}
    </>
  );
}
