// Where the tests find insitu, and how long they wait for one of its programs.
import { join } from "node:path";
import { fileURLToPath } from "node:url";

export const ROOT = fileURLToPath(new URL("../..", import.meta.url));
export const PYTHON = process.env.PYTHON ?? join(ROOT, ".venv/bin/python");
export const ENV = { ...process.env, PYTHONPATH: `${join(ROOT, "src")}:${ROOT}` };

/** What `wanted` finds in the output of a program, which must not end before. */
export async function saying(child, streams, wanted, seconds, name) {
  let said = "";
  let timer;
  try {
    return await new Promise((found, failed) => {
      timer = setTimeout(() => failed(new Error(`${name}: nothing within ${seconds} s but: ${said}`)), seconds * 1000);
      const listen = (data) => {
        said += data;
        const match = wanted.exec(said);
        if (match) found(match[1]);
      };
      for (const stream of streams) stream.on("data", listen);
      child.once("exit", (code) => failed(new Error(`${name} ended with ${code}: ${said}`)));
    });
  } finally {
    clearTimeout(timer);
  }
}
