import type { ComponentChildren } from "preact";

import { reachable } from "../api";
import { kept } from "../kept";
import { href } from "../route";

interface Props {
  parts: readonly (string | number)[];
  /** The filters of a list; a report has none. */
  filters?: Readonly<Record<string, string | number>>;
  children: ComponentChildren;
}

/** A link, or its words alone where a report does not hold what it leads to. */
export function To({ parts, filters, children }: Props) {
  if (filters ? kept !== null : !reachable(parts)) return <>{children}</>;
  return <a href={href(parts, filters)}>{children}</a>;
}
