// The real API over a state directory whose supervisor is a stand-in (tests/support/pages_backend.py).
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const PYTHON = process.env.PYTHON ?? join(ROOT, ".venv/bin/python");
const STARTS_WITHIN_MS = 60_000;
const KEY = "own-key-of-the-browser-tests";

/** Start the API; `keys` are those that one can log in with. */
export async function api() {
  const folder = mkdtempSync(join(tmpdir(), "insitu-api-"));
  const state = join(folder, "state");
  const env = { ...process.env, PYTHONPATH: join(ROOT, "src"), INSITU_API_KEY: KEY, INSITU_STATE_DIR: state };
  const run = (...given) => execFileSync(PYTHON, given, { cwd: ROOT, env, encoding: "utf8", timeout: 120_000 });
  const keys = JSON.parse(run("-m", "tests.support.pages_backend", "--state-dir", state));
  const child = spawn(PYTHON, ["-m", "insitu.backend.http", "--port", "0", "--state-dir", state], { cwd: ROOT, env, stdio: ["ignore", "ignore", "pipe"] });
  const ended = new Promise((done) => child.once("exit", done));
  const stop = async () => {
    child.kill("SIGTERM");
    await ended;
    rmSync(folder, { recursive: true, force: true });
  };
  let said = "";
  let timer;
  try {
    const address = await new Promise((found, failed) => {
      timer = setTimeout(() => failed(new Error(`no address within ${STARTS_WITHIN_MS / 1000} s: ${said}`)), STARTS_WITHIN_MS);
      child.stderr.on("data", (data) => {
        said += data;
        const match = /api listens on (http:\/\/[\w.]+:\d+)/.exec(said);
        if (match) found(`${match[1]}/`);
      });
      child.once("exit", (code) => failed(new Error(`the API ended with ${code}: ${said}`)));
    });
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
  } finally {
    clearTimeout(timer);
  }
}
