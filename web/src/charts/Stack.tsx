import { useState } from "preact/hooks";

import { figure } from "../format";
import { bins } from "../paging";
import { useWidth } from "../parts/hooks";
import { wholeTicks } from "../scale";

export interface Share {
  key: string;
  label: string;
  /** Class of its colour. */
  fill: string;
}

export interface Bar {
  x: number;
  values: Readonly<Record<string, number>>;
}

interface Props {
  label: string;
  unit: string;
  shares: readonly Share[];
  bars: readonly Bar[];
  height?: number;
}

const TOP = 10;
const BOTTOM = 22;

/** One bar a step, as high as its rollouts; where steps are too many for the width, a bar is the mean of several. */
export function Stack({ label, unit, shares, bars, height = 210 }: Props) {
  const [ref, width] = useWidth<HTMLDivElement>();
  const [at, setAt] = useState<number | null>(null);
  const groups = bins(bars.length, Math.max(1, Math.floor(width / 8))).map(({ first, end }) => {
    const members = bars.slice(first, end);
    const values: Record<string, number> = {};
    for (const share of shares) values[share.key] = members.reduce((sum, bar) => sum + (bar.values[share.key] ?? 0), 0) / members.length;
    return { from: members[0]?.x ?? 0, to: members[members.length - 1]?.x ?? 0, values };
  });
  const total = (values: Readonly<Record<string, number>>) => shares.reduce((sum, share) => sum + (values[share.key] ?? 0), 0);
  const most = Math.max(1, ...groups.map((group) => total(group.values)));
  const wide = width / Math.max(1, groups.length);
  const room = height - TOP - BOTTOM;
  const move = (step: number) => setAt((now) => Math.max(0, Math.min(groups.length - 1, (now ?? (step > 0 ? -1 : groups.length)) + step)));
  const chosen = groups[at ?? groups.length - 1];
  const ticks = wholeTicks(0, groups.length - 1, Math.max(2, Math.floor(width / 90)));
  return (
    <div
      class="figure"
      ref={ref}
      role="application"
      aria-roledescription="chart"
      tabIndex={0}
      aria-label={`${label}. Arrow keys read single bars.`}
      onKeyDown={(event) => {
        if (event.key === "ArrowRight") move(1);
        else if (event.key === "ArrowLeft") move(-1);
        else if (event.key === "Escape") setAt(null);
        else return;
        event.preventDefault();
      }}
    >
      {width > 0 && (
        <svg height={height} viewBox={`0 0 ${width} ${height}`} aria-hidden="true" onPointerLeave={() => setAt(null)}>
          {groups.map((group, index) => {
            let y = height - BOTTOM;
            return (
              <g key={group.from} onPointerEnter={() => setAt(index)}>
                <rect class="hit" x={index * wide} y={0} width={wide} height={height} />
                {shares.map((share) => {
                  const high = ((group.values[share.key] ?? 0) / most) * room;
                  y -= high;
                  return high > 0 ? (
                    <rect key={share.key} class={share.fill} x={index * wide + wide * 0.08} y={y} width={Math.min(wide * 0.84, 60)} height={high} />
                  ) : null;
                })}
                {at === index && <line class="cursor" x1={index * wide + Math.min(wide, 70) / 2} x2={index * wide + Math.min(wide, 70) / 2} y1={TOP - 8} y2={height - BOTTOM + 4} />}
              </g>
            );
          })}
          {ticks.map((tick) => (
            <text key={`t${tick}`} x={tick * wide + Math.min(wide, 70) / 2} y={height - 6} text-anchor="middle">
              {groups[tick]?.from}
            </text>
          ))}
        </svg>
      )}
      <p class="readout" aria-live="polite">
        {chosen && (
          <>
            {unit} <b>{chosen.from === chosen.to ? chosen.from : `${chosen.from} to ${chosen.to}`}</b>
            {chosen.from === chosen.to ? ": " : ", each: "}
            {shares
              .filter((share) => (chosen.values[share.key] ?? 0) > 0)
              .map((share) => `${figure(chosen.values[share.key])} ${share.label}`)
              .join(", ") || "no rollouts"}
          </>
        )}
      </p>
    </div>
  );
}

export function Legend({ shares }: { shares: readonly Share[] }) {
  return (
    <p class="legend">
      {shares.map((share) => (
        <span key={share.key}>
          <i class={`key ${share.fill}`} />
          {share.label}
        </span>
      ))}
    </p>
  );
}
