// The pictures of docs/view.md: node pictures.mjs, with INSITU_VIEW_RUN for a run of your own.
import { statSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { launch, open } from "./browser/chromium.mjs";
import { aLiveRun, aRun, read, serve } from "./browser/server.mjs";

const OUT = fileURLToPath(new URL("../docs/images/", import.meta.url));
const MOST_BYTES = 150_000;

const browser = await launch();
try {
  const run = aRun();
  await pictures(run, (base, group, rollout) => [
    ["run", `#/${base}`, {}],
    ["run-dark", `#/${base}`, { dark: true }],
    ["rollouts", `#/${base}/rollouts?kind=training&sort=worst`, { height: 760 }],
    ["rollout", `#/${base}/rollouts/${encodeURIComponent(rollout.rollout_id)}`, { height: 1080 }],
    ["group", `#/${base}/groups/${group.store}/${group.index}`, { height: 760 }],
    ["group-narrow", `#/${base}/groups/${group.store}/${group.index}`, { width: 380, height: 900 }],
    ["compare", `#/${base}/compare`, { height: 760 }, compare],
  ]);
  // To go on from a fork takes a backend.
  await pictures(await aLiveRun(), (base, group) => [["fork", `#/${base}/groups/${group.store}/${group.index}`, { height: 940 }, goOn]]);
} finally {
  await browser.close();
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

/** Serve a run, take its pictures, and remove it. */
async function pictures(run, shots) {
  const server = await serve(run);
  try {
    const [{ key, path }] = (await read(server.address, "runs")).runs;
    const base = `runs/${encodeURIComponent(key)}`;
    const [group] = (await read(server.address, `${base}/groups?sort=spread&limit=1&kind=training`)).groups;
    const [rollout] = (await read(server.address, `${base}/rollouts?limit=1&index=${group.index}&store=${group.store}`)).rollouts;
    for (const shot of shots(base, group, rollout)) await picture(server, path, ...shot);
  } finally {
    await server.stop();
    await run.remove();
  }
}

async function picture(server, path, name, hash, size, act = async () => {}) {
  const { page, close, problems } = await open(browser, size);
  // The picture names no folder of the machine that made it.
  await page.route("**/view/v1/**", async (route) => {
    const answer = await route.fetch({ timeout: 180_000 });
    await route.fulfill({ response: answer, body: (await answer.text()).replaceAll(path, "output") });
  });
  await page.goto(server.address + hash);
  await page.waitForSelector("main section");
  await page.waitForFunction(() => !document.querySelector("main").textContent.includes("Loading "));
  await act(page);
  await page.waitForTimeout(300);
  const file = `${OUT}view-${name}.png`;
  await page.screenshot({ path: file });
  const { size: bytes } = statSync(file);
  console.log(`view-${name}.png ${bytes}`);
  if (bytes > MOST_BYTES || problems.length) throw new Error(`${file}: ${bytes} bytes, ${problems.join("; ")}`);
  await close();
}
