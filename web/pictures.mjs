// The pictures of docs/view.md, from a real run of the demo's project on a real backend: make pictures
import { statSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { backend } from "./browser/backend.mjs";
import { launch, open } from "./browser/chromium.mjs";
import { read, serve } from "./browser/server.mjs";
import { loaded, logIn } from "./browser/visits.mjs";

const OUT = fileURLToPath(new URL("../docs/images/", import.meta.url));
const MOST_BYTES = 150_000;

const real = await backend();
const browser = await launch();
const view = await serve(real.own);
try {
  const [{ key, path }] = (await read(view.address, "runs")).runs;
  const base = `runs/${encodeURIComponent(key)}`;
  // Of the last steps, whose weights are kept.
  const { groups } = await read(view.address, `${base}/groups?sort=spread&limit=100&kind=training`);
  const group = groups.find((each) => each.epoch >= 4);
  const [rollout] = (await read(view.address, `${base}/rollouts?limit=1&index=${group.index}&store=${group.store}`)).rollouts;
  const ofGroup = `#/${base}/groups/${group.store}/${group.index}`;
  const shots = [
    ["run", `#/${base}`, {}],
    ["run-dark", `#/${base}`, { dark: true }],
    ["rollouts", `#/${base}/rollouts?kind=training&sort=worst`, { height: 760 }],
    ["rollout", `#/${base}/rollouts/${encodeURIComponent(rollout.rollout_id)}`, { height: 1080 }],
    ["group", ofGroup, { height: 760 }],
    ["group-narrow", ofGroup, { width: 380, height: 900 }],
    ["compare", `#/${base}/compare`, { height: 760 }, compare],
    ["fork", ofGroup, { height: 940 }, goOn],
  ];
  for (const [name, hash, size, act] of shots) await picture(view.address + hash, path, `view-${name}`, size, act);
  const inside = async (page) => {
    await logIn(page, real.keys.submit);
    await page.waitForSelector("text=Log out");
  };
  for (const [name, hash] of [["run", "#/runs/adder"], ["fleet", "#/fleet"]]) await picture(real.api + hash, real.project, `api-${name}`, {}, inside, /status of 401/);
} finally {
  await browser.close();
  await view.stop();
  await real.stop();
}

/** Open one of the examples. */
async function compare(page) {
  await page.locator(".vrow a").first().click();
  await page.waitForSelector(".pair");
}

/** Sample from the last fork, by the weights that made the group. */
async function goOn(page) {
  await page.getByRole("button", { name: /^Go on from the fork/ }).last().click();
  await page.getByRole("button", { name: "Sample" }).click();
  await page.waitForSelector(".tree li.again", { timeout: 150_000 });
}

async function picture(address, path, name, size, act = async () => {}, expected = /^$/) {
  const { page, close, problems } = await open(browser, size);
  // The picture names no folder of the machine that made it.
  await page.route(/\/(view\/)?v1\//, async (route) => {
    const answer = await route.fetch({ timeout: 180_000 });
    await route.fulfill({ response: answer, body: (await answer.text()).replaceAll(path, "output") });
  });
  await page.goto(address);
  await page.waitForSelector("main section");
  await loaded(page);
  await act(page);
  await loaded(page);
  await page.waitForTimeout(300);
  const file = `${OUT}${name}.png`;
  await page.screenshot({ path: file });
  const { size: bytes } = statSync(file);
  console.log(`${name}.png ${bytes}`);
  const wrong = problems.filter((problem) => !expected.test(problem));
  if (bytes > MOST_BYTES || wrong.length) throw new Error(`${file}: ${bytes} bytes, ${wrong.join("; ")}`);
  await close();
}
