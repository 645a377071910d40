import { useState } from "preact/hooks";

import { ApiError } from "../api";
import { backend } from "./calls";

/** Exchange a key for a session. The key goes into one request and is kept nowhere. */
export function Login({ onDone }: { onDone: () => void }) {
  const [key, setKey] = useState("");
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState<Error | null>(null);
  const submit = async () => {
    setBusy(true);
    setProblem(null);
    try {
      await backend.logIn(key);
      setKey("");
      onDone();
    } catch (error) {
      setProblem(error instanceof Error ? error : new Error(String(error)));
    } finally {
      setBusy(false);
    }
  };
  return (
    <section>
      <h1>
        <b>Log in</b> with a key of this backend
      </h1>
      <form
        class="filters login"
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}
      >
        <label>
          key
          <input type="password" autocomplete="current-password" required value={key} onInput={(event) => setKey(event.currentTarget.value)} />
        </label>
        <button disabled={busy}>Log in</button>
      </form>
      {problem && (
        <p class="say bad" role="alert">
          {problem.message} {problem instanceof ApiError && problem.hint}
        </p>
      )}
      <p class="say">
        The value of <code>INSITU_API_KEY</code>, or a key of <code>insitu keys create</code>: the pages may do what the key may. The session ends after 12 hours, or with the key.
      </p>
    </section>
  );
}
