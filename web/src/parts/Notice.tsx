import { ApiError } from "../api";
import type { Loaded } from "./hooks";

/** What stands in the place of something that is not there yet, or cannot be had. */
export function Pending<T>({ loaded, of }: { loaded: Loaded<T>; of: string }) {
  if (loaded.state === "failed") {
    const { error } = loaded;
    return (
      <section role="alert">
        <p>
          <b>{of} could not be loaded.</b> {error.message}
        </p>
        {error instanceof ApiError && error.hint && <p class="fix">{error.hint}</p>}
      </section>
    );
  }
  return (
    <p class="notice" role="status">
      Loading {of.toLowerCase()} …
    </p>
  );
}
