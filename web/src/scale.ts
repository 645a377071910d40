// Axes of the charts. Pure functions.

export interface Axis {
  low: number;
  high: number;
  ticks: readonly number[];
}

/** Round ticks that cover the values, about `wanted` of them. */
export function axis(values: Iterable<number | null | undefined>, wanted = 4, include: readonly number[] = []): Axis {
  let low = Infinity;
  let high = -Infinity;
  for (const group of [values, include]) {
    for (const value of group) {
      if (value == null || !Number.isFinite(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return { low: 0, high: 1, ticks: [0, 1] };
  if (low === high) {
    const room = Math.abs(low) || 1;
    low -= room / 2;
    high += room / 2;
  }
  const step = niceStep((high - low) / wanted);
  const first = Math.floor(low / step + 1e-9) * step;
  const last = Math.ceil(high / step - 1e-9) * step;
  const ticks: number[] = [];
  for (let index = 0; index <= Math.round((last - first) / step); index += 1) ticks.push(rounded(first + index * step, step));
  return { low: ticks[0] ?? first, high: ticks[ticks.length - 1] ?? last, ticks };
}

export function niceStep(raw: number): number {
  const power = 10 ** Math.floor(Math.log10(raw));
  const share = raw / power;
  return (share <= 1 ? 1 : share <= 2 ? 2 : share <= 2.5 ? 2.5 : share <= 5 ? 5 : 10) * power;
}

function rounded(value: number, step: number): number {
  const decimals = Math.max(0, 3 - Math.floor(Math.log10(step)));
  return Number(value.toFixed(Math.min(15, decimals)));
}

/** Whole numbers for an axis of steps, at most `wanted`. */
export function wholeTicks(first: number, last: number, wanted: number): number[] {
  if (last <= first) return [first];
  const step = Math.max(1, niceWhole((last - first) / Math.max(1, wanted)));
  const out: number[] = [];
  for (let at = Math.ceil(first / step) * step; at <= last; at += step) out.push(at);
  return out;
}

function niceWhole(raw: number): number {
  const step = niceStep(Math.max(raw, 1));
  return Number.isInteger(step) ? step : Math.ceil(step);
}

export function place(value: number, low: number, high: number, from: number, to: number): number {
  if (high === low) return (from + to) / 2;
  return from + ((value - low) / (high - low)) * (to - from);
}

/** Points of a polyline, in parts: a gap in the values is a gap in the line. */
export function lines(xs: readonly number[], ys: readonly (number | null)[]): string[] {
  const out: string[] = [];
  let part: string[] = [];
  const close = () => {
    if (part.length) out.push(part.join(" "));
    part = [];
  };
  ys.forEach((y, index) => {
    const x = xs[index];
    if (y === null || x === undefined || !Number.isFinite(y)) close();
    else part.push(`${x.toFixed(1)},${y.toFixed(1)}`);
  });
  close();
  return out;
}
