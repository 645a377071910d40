// A real `insitu view` over a run directory that is made here.
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";

import { ENV, PYTHON, ROOT, saying } from "./python.mjs";

const STARTS_WITHIN_SECONDS = 120;

/** A run directory with its tokenizer, and a configuration that names it; `remove` deletes what was made. */
export function aRun() {
  const folder = mkdtempSync(join(tmpdir(), "insitu-view-"));
  const directory = join(folder, "output");
  const tokenizer = join(folder, "tokenizer");
  execFileSync(PYTHON, ["-m", "tests.support.viewed_run", "--directory", directory, "--tokenizer", tokenizer, "--epochs", "6"], { cwd: ROOT, env: ENV, stdio: ["ignore", "ignore", "inherit"], timeout: 300_000 });
  const { config: made } = JSON.parse(readFileSync(join(directory, "config.json"), "utf8"));
  const config = join(folder, "config.yml");
  writeFileSync(config, JSON.stringify({ ...made, finetuning: { ...made.finetuning, output_dir: directory } }));
  return { directory, config, tokenizer, remove: () => rmSync(folder, { recursive: true, force: true }) };
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
  try {
    const directory = await saying(child, [child.stdout], /^(.*config\.yml)$/m, STARTS_WITHIN_SECONDS, "the run");
    return { directory, tokenizer, folder: dirname(directory), remove };
  } catch (error) {
    child.kill("SIGKILL");
    await remove();
    throw error;
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
  try {
    const address = await saying(child, [child.stdout, child.stderr], /(http:\/\/[\w.]+:\d+\/)/, STARTS_WITHIN_SECONDS, "insitu view");
    return { address, port: Number(new URL(address).port), stop };
  } catch (error) {
    await stop("SIGKILL");
    throw error;
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
