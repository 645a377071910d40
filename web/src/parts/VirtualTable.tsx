import { type ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { count } from "../format";
import { rowsInSight, wantsMore } from "../paging";
import { useMedia } from "./hooks";

interface Column<T> {
  name: string;
  /** Class of the cell, which places it on narrow screens. */
  cell: string;
  show: (row: T) => ComponentChildren;
}

interface Props<T> {
  label: string;
  kind: string;
  columns: readonly Column<T>[];
  rows: readonly T[];
  total: number;
  hasMore: boolean;
  onMore: () => void;
  idOf: (row: T) => string;
  hrefOf: (row: T) => string;
}

const WIDE_ROW = 44;
const NARROW_ROW = 92;

/** A table of any length: only rows in sight are in the document. Arrow keys go from row to row. */
export function VirtualTable<T>({ label, kind, columns, rows, total, hasMore, onMore, idOf, hrefOf }: Props<T>) {
  const box = useRef<HTMLDivElement>(null);
  const narrow = useMedia("(max-width: 640px)");
  const rowHeight = narrow ? NARROW_ROW : WIDE_ROW;
  const [scrolled, setScrolled] = useState(0);
  const [height, setHeight] = useState(600);
  const wanted = useRef<number | null>(null);
  const sight = rowsInSight(scrolled, height, rowHeight, rows.length);
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setHeight(element.clientHeight || 600));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (wantsMore(sight, rows.length, hasMore)) onMore();
  }, [sight.end, rows.length, hasMore]);
  useEffect(() => {
    if (wanted.current === null) return;
    const link = box.current?.querySelector<HTMLElement>(`[data-row="${wanted.current}"]`);
    if (link) {
      wanted.current = null;
      link.focus({ preventScroll: true });
    }
  });
  const go = (from: number, by: number) => {
    const element = box.current;
    const target = Math.max(0, Math.min(rows.length - 1, from + by));
    if (!element) return;
    const head = narrow ? 0 : 34;
    const top = target * rowHeight;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + rowHeight + head > element.scrollTop + element.clientHeight) element.scrollTop = top + rowHeight + head - element.clientHeight;
    wanted.current = target;
    setScrolled(element.scrollTop);
    element.querySelector<HTMLElement>(`[data-row="${target}"]`)?.focus({ preventScroll: true });
  };
  return (
    <div
      ref={box}
      class={`vtable ${kind}`}
      role="table"
      aria-label={label}
      aria-rowcount={total + 1}
      onScroll={(event) => setScrolled(event.currentTarget.scrollTop)}
      onKeyDown={(event) => {
        const at = (event.target as HTMLElement).dataset["row"];
        if (at === undefined) return;
        const moves: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -rows.length, End: rows.length };
        const by = moves[event.key];
        if (by === undefined) return;
        event.preventDefault();
        go(Number(at), by);
      }}
    >
      <div class="vhead" role="row" aria-rowindex={1}>
        {columns.map((column) => (
          <span key={column.name} role="columnheader" class={column.cell}>
            {column.name}
          </span>
        ))}
      </div>
      <div class="vbody" role="rowgroup" style={{ height: `${rows.length * rowHeight}px` }}>
        {rows.slice(sight.first, sight.end).map((row, index) => {
          const place = sight.first + index;
          return (
            <div key={idOf(row)} class="vrow" role="row" aria-rowindex={place + 2} style={{ top: `${place * rowHeight}px`, height: `${rowHeight}px` }}>
              {columns.map((column, position) => (
                <span key={column.name} role="cell" class={column.cell}>
                  {position === 0 ? (
                    <a class="cover" href={hrefOf(row)} data-row={place}>
                      {column.show(row)}
                    </a>
                  ) : (
                    column.show(row)
                  )}
                </span>
              ))}
            </div>
          );
        })}
      </div>
      {rows.length < total && (
        <p class="vfoot">
          {count(rows.length)} of {count(total)} loaded; the rest comes as you scroll.
        </p>
      )}
    </div>
  );
}
