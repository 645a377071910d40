// A real backend with runs of the demo's project (tests/support/demo_runs.py); it takes some minutes.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { ENV, PYTHON, ROOT, saying } from "./python.mjs";

const TRAINS_WITHIN_SECONDS = 900;

/** Start it and train the first run; `train` begins the next one and ends with it. */
export async function backend() {
  const folder = mkdtempSync(join(tmpdir(), "i-")); // short: Ray's sockets lie in it
  const env = { ...ENV, TMPDIR: folder };
  const child = spawn(PYTHON, ["-m", "tests.support.demo_runs", "--folder", folder], { cwd: ROOT, env, stdio: ["pipe", "pipe", "inherit"] });
  const ended = new Promise((done) => child.once("exit", done));
  const stop = async () => {
    child.stdin.end();
    await ended;
    rmSync(folder, { recursive: true, force: true });
  };
  const line = (wanted) => saying(child, [child.stdout], wanted, TRAINS_WITHIN_SECONDS, "the backend");
  try {
    const places = JSON.parse(await line(/^(\{.*\})$/m));
    const train = () => {
      child.stdin.write("\n");
      return line(/^(\w+)$/m);
    };
    const own = { directory: places.config, tokenizer: places.tokenizer, folder: places.project };
    return { ...places, own, all: { ...own, directory: places.runs }, train, stop };
  } catch (error) {
    await stop();
    throw error;
  }
}
