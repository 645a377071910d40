// A real `insitu view` over a real run directory: INSITU_VIEW_RUN (and INSITU_VIEW_TOKENIZER), or one made here.
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const PYTHON = process.env.PYTHON ?? join(ROOT, ".venv/bin/python");
const ENV = { ...process.env, PYTHONPATH: `${join(ROOT, "src")}:${ROOT}` };
const STARTS_WITHIN_MS = 120_000;

/** A run directory with its tokenizer; `remove` deletes what was made. */
export function aRun() {
  if (process.env.INSITU_VIEW_RUN) return { directory: process.env.INSITU_VIEW_RUN, tokenizer: process.env.INSITU_VIEW_TOKENIZER, remove: () => {} };
  const folder = mkdtempSync(join(tmpdir(), "insitu-view-"));
  const directory = join(folder, "output");
  const tokenizer = join(folder, "tokenizer");
  execFileSync(PYTHON, ["-m", "tests.support.viewed_run", "--directory", directory, "--tokenizer", tokenizer, "--epochs", "6"], { cwd: ROOT, env: ENV, stdio: ["ignore", "ignore", "inherit"], timeout: 300_000 });
  return { directory, tokenizer, remove: () => rmSync(folder, { recursive: true, force: true }) };
}

/** A run whose backend, a stand-in, is still there: its configuration, tokenizer and folder. */
export async function aLiveRun() {
  const folder = mkdtempSync(join(tmpdir(), "insitu-live-"));
  const tokenizer = join(folder, "tokenizer");
  const child = spawn(PYTHON, ["-m", "tests.support.viewed_run", "--stay", folder, "--tokenizer", tokenizer, "--epochs", "2"], { cwd: ROOT, env: ENV, stdio: ["pipe", "pipe", "inherit"] });
  const ended = new Promise((done) => child.once("exit", done));
  const remove = async () => {
    child.stdin.end();
    await ended;
    rmSync(folder, { recursive: true, force: true });
  };
  let timer;
  try {
    const directory = await new Promise((found, failed) => {
      timer = setTimeout(() => failed(new Error(`no run within ${STARTS_WITHIN_MS / 1000} s`)), STARTS_WITHIN_MS);
      let said = "";
      child.stdout.on("data", (data) => {
        said += data;
        const match = /^(.*config\.yml)$/m.exec(said);
        if (match) found(match[1]);
      });
      child.once("exit", (code) => failed(new Error(`the run ended with ${code}`)));
    });
    return { directory, tokenizer, folder: dirname(directory), remove };
  } catch (error) {
    child.kill("SIGKILL");
    await remove();
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** Start `insitu view` and wait for the address that it prints. */
export async function serve({ directory, tokenizer, folder = ROOT }, port = 0) {
  const given = ["-m", "insitu.cli", "view", directory, "--port", String(port), "--no-browser"];
  if (tokenizer) given.push("--tokenizer", tokenizer);
  const child = spawn(PYTHON, given, { cwd: folder, env: ENV, stdio: ["ignore", "pipe", "pipe"] });
  const ended = new Promise((done) => child.once("exit", done));
  const stop = async (signal = "SIGTERM") => {
    child.kill(signal);
    await ended;
  };
  let said = "";
  let timer;
  try {
    const address = await new Promise((found, failed) => {
      timer = setTimeout(() => failed(new Error(`no address within ${STARTS_WITHIN_MS / 1000} s: ${said}`)), STARTS_WITHIN_MS);
      const listen = (data) => {
        said += data;
        const match = /http:\/\/[\w.]+:\d+\//.exec(said);
        if (match) found(match[0]);
      };
      child.stdout.on("data", listen);
      child.stderr.on("data", listen);
      child.once("exit", (code) => failed(new Error(`insitu view ended with ${code}: ${said}`)));
    });
    return { address, port: Number(new URL(address).port), stop };
  } catch (error) {
    await stop("SIGKILL");
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** Write the run as one file. */
export function report({ directory, tokenizer }, out) {
  const given = ["-m", "insitu.cli", "report", directory, "--out", out, "--groups", "5"];
  if (tokenizer) given.push("--tokenizer", tokenizer);
  execFileSync(PYTHON, given, { cwd: ROOT, env: ENV, stdio: ["ignore", "ignore", "inherit"], timeout: 120_000 });
}

export async function read(address, path) {
  const answer = await fetch(`${address}view/v1/${path}`);
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}
