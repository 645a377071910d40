// The real API over a state directory whose supervisor is a stand-in (tests/support/pages_backend.py).
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { ENV, PYTHON, ROOT, saying } from "./python.mjs";

const STARTS_WITHIN_SECONDS = 60;
const KEY = "own-key-of-the-browser-tests";

/** Start the API; `keys` are those that one can log in with. */
export async function api() {
  const folder = mkdtempSync(join(tmpdir(), "insitu-api-"));
  const state = join(folder, "state");
  const env = { ...ENV, INSITU_API_KEY: KEY, INSITU_STATE_DIR: state };
  const run = (...given) => execFileSync(PYTHON, given, { cwd: ROOT, env, encoding: "utf8", timeout: 120_000 });
  const keys = JSON.parse(run("-m", "tests.support.pages_backend", "--state-dir", state));
  const child = spawn(PYTHON, ["-m", "insitu.backend.http", "--port", "0", "--state-dir", state], { cwd: ROOT, env, stdio: ["ignore", "ignore", "pipe"] });
  const ended = new Promise((done) => child.once("exit", done));
  const stop = async () => {
    child.kill("SIGTERM");
    await ended;
    rmSync(folder, { recursive: true, force: true });
  };
  try {
    const address = `${await saying(child, [child.stderr], /api listens on (http:\/\/[\w.]+:\d+)/, STARTS_WITHIN_SECONDS, "the API")}/`;
    const promoted = async (name) => {
      const answer = await fetch(`${address}v1/runs/${name}`, { headers: { authorization: `Bearer ${KEY}` } });
      return (await answer.json()).promoted;
    };
    /** Run a command of insitu as one would in a shell beside the backend. */
    const command = (line) => run("-m", "insitu.cli", ...line.split(" ").slice(1));
    const train = (name) => run("-m", "tests.support.pages_backend", "--state-dir", state, "--train", name);
    /** Seconds of CPU that the API has used: user and system time, which the kernel counts in hundredths. */
    const cpuSeconds = () => {
      const fields = readFileSync(`/proc/${child.pid}/stat`, "utf8").split(") ")[1].split(" ");
      return (Number(fields[11]) + Number(fields[12])) / 100;
    };
    return { address, keys, stop, promoted, train, cpuSeconds, run: command };
  } catch (error) {
    await stop();
    throw error;
  }
}
