// The pictures of docs/view.md: node pictures.mjs, with INSITU_VIEW_RUN for a run of your own.
import { statSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { launch, open } from "./browser/chromium.mjs";
import { aRun, read, serve } from "./browser/server.mjs";

const OUT = fileURLToPath(new URL("../docs/images/", import.meta.url));
const MOST_BYTES = 150_000;

const run = aRun();
const server = await serve(run);
const browser = await launch();
try {
  const [{ key, path }] = (await read(server.address, "runs")).runs;
  const base = `runs/${encodeURIComponent(key)}`;
  const [group] = (await read(server.address, `${base}/groups?sort=spread&limit=1&kind=training`)).groups;
  const [rollout] = (await read(server.address, `${base}/rollouts?limit=1&index=${group.index}&store=${group.store}`)).rollouts;
  const shots = [
    ["run", `#/${base}`, {}],
    ["run-dark", `#/${base}`, { dark: true }],
    ["rollouts", `#/${base}/rollouts?kind=training&sort=worst`, { height: 760 }],
    ["rollout", `#/${base}/rollouts/${encodeURIComponent(rollout.rollout_id)}`, { height: 1080 }],
    ["group", `#/${base}/groups/${group.store}/${group.index}`, { height: 760 }],
    ["group-narrow", `#/${base}/groups/${group.store}/${group.index}`, { width: 380, height: 900 }],
    ["compare", `#/${base}/compare`, { height: 760 }],
  ];
  for (const [name, hash, size] of shots) {
    const { page, close, problems } = await open(browser, size);
    // The picture names no folder of the machine that made it.
    await page.route("**/view/v1/**", async (route) => {
      const answer = await route.fetch();
      await route.fulfill({ response: answer, body: (await answer.text()).replaceAll(path, "output") });
    });
    await page.goto(server.address + hash);
    await page.waitForSelector("main section");
    await page.waitForFunction(() => !document.querySelector("main").textContent.includes("Loading "));
    if (name === "compare") {
      await page.locator(".vrow a").first().click();
      await page.waitForSelector(".pair");
    }
    await page.waitForTimeout(300);
    const file = `${OUT}view-${name}.png`;
    await page.screenshot({ path: file });
    const { size: bytes } = statSync(file);
    console.log(`view-${name}.png ${bytes}`);
    if (bytes > MOST_BYTES || problems.length) throw new Error(`${file}: ${bytes} bytes, ${problems.join("; ")}`);
    await close();
  }
} finally {
  await browser.close();
  await server.stop();
  run.remove();
}
