import { place } from "../scale";

/** A bar to the right (green) or to the left (red) of the middle. */
export function AdvantageBar({ value, full }: { value: number | null; full: number }) {
  const size = value === null ? 0 : Math.min(1, Math.abs(value) / full) * 38;
  return (
    <svg class="bar" viewBox="0 0 80 10" width="80" height="10" aria-hidden="true">
      <line class="grid" x1={40} x2={40} y1={0} y2={10} />
      {value !== null && value !== 0 && <rect class={value > 0 ? "a-pos" : "a-neg"} x={value > 0 ? 40 : 40 - size} y={1} width={size} height={8} rx={3} />}
    </svg>
  );
}

/** An estimate with its interval around zero. */
export function Interval({ value, low, high, label }: { value: number; low: number | null; high: number | null; label: string }) {
  const full = Math.max(Math.abs(value), Math.abs(low ?? 0), Math.abs(high ?? 0), 1e-9) * 1.15;
  const px = (at: number) => place(at, -full, full, 4, 316);
  return (
    <svg class="interval" viewBox="0 0 320 34" width="320" height="34" role="img" aria-label={label}>
      <line class="grid" x1={4} x2={316} y1={14} y2={14} />
      <line class="cursor" x1={px(0)} x2={px(0)} y1={2} y2={24} />
      <text x={px(0)} y={33} text-anchor="middle">
        no difference
      </text>
      {low !== null && high !== null && <line class="mean" x1={px(low)} x2={px(high)} y1={14} y2={14} />}
      <circle class="dot" cx={px(value)} cy={14} r={5} />
    </svg>
  );
}
