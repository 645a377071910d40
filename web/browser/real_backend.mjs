// Every page over a real backend: real engine, trainer, gateway, API and `insitu finetune`. `make view-real`, 10 minutes.
// With INSITU_SHOTS a picture of every page at every size is written to that folder.
import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";
import { after, before, describe, it } from "node:test";

import { backend } from "./backend.mjs";
import { launch, open, shows, until } from "./chromium.mjs";
import { read, serve } from "./server.mjs";
import { calm, fits, loaded, logIn, SIZES } from "./visits.mjs";

const SHOTS = process.env.INSITU_SHOTS;
const ALIKE = 0.05; // of log-probabilities: the engine's precision, in batches of another size

let browser;
let real;
let viewed;
before(async () => {
  if (SHOTS) mkdirSync(SHOTS, { recursive: true });
  real = await backend();
  browser = await launch();
  viewed = await serve(real.all);
});
after(async () => {
  await browser?.close();
  await viewed?.stop();
  await real?.stop();
});

async function keyOf(name) {
  const { runs } = await read(viewed.address, "runs");
  return encodeURIComponent(runs.find((run) => run.name === name).key);
}

/** Open a page of `insitu view`. */
async function visit(hash, options, base = viewed.address) {
  const opened = await open(browser, options);
  await opened.page.goto(base + hash);
  await opened.page.waitForSelector("main h1, main section");
  await loaded(opened.page);
  return opened;
}

/** Open a page of the API and log in. */
async function inside(hash, key, options) {
  const opened = await open(browser, options);
  await opened.page.goto(real.api + hash);
  await opened.page.waitForSelector("input[type=password]");
  await logIn(opened.page, key);
  await opened.page.waitForSelector("text=Log out");
  await loaded(opened.page);
  return opened;
}

/** A page at every size and in both colours. */
async function looksRight(name, enter, text, expected) {
  for (const [width, dark] of SIZES) {
    const opened = await enter({ width, dark });
    await shows(opened.page.locator("main"), text);
    await fits(opened.page, name);
    await calm(opened, expected);
    if (SHOTS) await opened.page.screenshot({ path: `${SHOTS}/${name}-${width}-${dark ? "dark" : "light"}.png`, fullPage: true });
    await opened.close();
  }
}

/** Press Tab until the link or button with this text has the focus, or Shift and Tab: it may be before a long table. */
async function tabTo(page, text) {
  for (const [key, presses] of [["Tab", 20], ["Shift+Tab", 60]]) {
    for (let press = 0; press < presses; press += 1) {
      await page.keyboard.press(key);
      if (await page.evaluate((wanted) => document.activeElement.textContent.trim() === wanted, text)) return;
    }
  }
  throw new Error(`the keyboard does not reach "${text}"`);
}

describe("insitu view", () => {
  let key;
  let group;
  let rollout;
  before(async () => {
    key = await keyOf("adder");
    [group] = (await read(viewed.address, `runs/${key}/groups?sort=spread&limit=1&kind=training`)).groups;
    const { rollouts } = await read(viewed.address, `runs/${key}/rollouts?kind=training&sort=newest&limit=100`);
    rollout = encodeURIComponent(rollouts.find((each) => each.fate === "trained").rollout_id);
  });

  const PAGES = {
    runs: [() => "#/", /adder[^]*succeeded/],
    run: [() => `#/runs/${key}`, /Reward[^]*entropy/],
    rollouts: [() => `#/runs/${key}/rollouts`, /Rollouts of adder/],
    rollout: [() => `#/runs/${key}/rollouts/${rollout}`, /Conversation[^]*tokens/],
    groups: [() => `#/runs/${key}/groups`, /Groups of adder/],
    group: [() => `#/runs/${key}/groups/${group.store}/${group.index}`, /8 siblings, one tree/],
    compare: [() => `#/runs/${key}/compare`, /paired over/],
  };
  for (const [name, [hash, text]] of Object.entries(PAGES)) {
    it(`${name}: light and dark, narrow and wide`, () => looksRight(`view-${name}`, (size) => visit(hash(), size), text));
  }

  it("leads from the runs to a comparison by the keyboard alone", async () => {
    const opened = await visit("#/");
    const { page } = opened;
    await tabTo(page, "adder");
    await page.keyboard.press("Enter");
    await shows(page.locator("main"), /Reward/);
    for (const [link, text] of [["Rollouts", /Rollouts of adder/], ["Groups", /Groups of adder/], ["Compare", /paired over/]]) {
      await tabTo(page, link);
      await page.keyboard.press("Enter");
      await shows(page.locator("main"), text);
    }
    await calm(opened);
    await opened.close();
  });

  it("shows the trainer's own log-probability of every token of the newest step", async () => {
    const { calls } = await read(viewed.address, `runs/${key}/rollouts/${rollout}`);
    const opened = await visit(`#/runs/${key}/rollouts/${rollout}?colour=difference`);
    assert.doesNotMatch(await opened.page.locator("main").innerText(), /is not kept/);
    const [{ output }] = calls;
    assert.ok(output.trainer_logprobs.length > 0);
    for (const [place, trainer] of output.trainer_logprobs.entries()) assert.ok(Math.abs(trainer - output.logprobs[place]) < 1, `token ${place}`);
    await opened.close();
  });

  it("goes on from a fork by the base model and by the weights of the group, from the exact ids", async () => {
    const own = await serve(real.own);
    try {
      const [{ key: name }] = (await read(own.address, "runs")).runs;
      const kept = (await read(own.address, `runs/${name}/groups?sort=spread&kind=training&limit=100`)).groups.filter((each) => each.epoch >= 4);
      assert.ok(kept.length > 0, "no group of the last two steps");
      const opened = await visit(`#/runs/${encodeURIComponent(name)}/groups/${kept[0].store}/${kept[0].index}`, {}, own.address);
      const { page } = opened;
      await page.getByRole("button", { name: /^Go on from the fork/ }).first().press("Enter");
      await page.getByLabel("answers").fill("2");
      const sample = async () => {
        await page.getByRole("button", { name: "Sample" }).press("Enter");
        await page.waitForSelector("[aria-busy=true]");
        await page.waitForFunction(() => !document.querySelector("[aria-busy=true]"), null, { timeout: 150_000 });
        assert.equal(await page.locator(".tree li.again .leaf").count(), 2, await page.locator(".goon").innerText());
      };
      await sample(); // by the step that made the group, which is chosen
      const said = await page.locator(".goon").innerText();
      const gap = Number(/as likely as in the record \(difference ([\d.e−]+)\)/.exec(said)?.[1].replace("−", "-"));
      assert.ok(gap < ALIKE, said);
      if (SHOTS) await page.screenshot({ path: `${SHOTS}/view-fork.png`, fullPage: true });
      await page.getByLabel("With").selectOption("the base model");
      await sample();
      await fits(page, "a fork");
      await calm(opened);
      await opened.close();
    } finally {
      await own.stop();
    }
  });
});

describe("the API", () => {
  const REJECTED = /status of 401/;
  const PAGES = {
    runs: ["", /1 run on this backend[^]*adder/],
    run: ["#/runs/adder", /adder after 6 steps[^]*entropy[^]*Step 6, second by second/],
    checkpoints: ["#/runs/adder/checkpoints", /Calls to adder get step 6/],
    fleet: ["#/fleet", /replica-0[^]*adder@6[^]*free/],
  };
  for (const [name, [hash, text]] of Object.entries(PAGES)) {
    it(`${name}: light and dark, narrow and wide`, () => looksRight(`api-${name}`, (size) => inside(hash, real.keys.submit, size), text, REJECTED));
  }

  it("serves the step that a page promotes, and follows the newest again", async () => {
    const opened = await inside("#/runs/adder/checkpoints", real.keys.admin);
    const { page } = opened;
    const press = async (name) => {
      await page.getByRole("button", { name, exact: true }).press("Enter");
      await page.getByRole("button", { name: `Yes: ${name}`, exact: true }).press("Enter");
    };
    const served = page.locator("main h2").first();
    const promote = await page.getByRole("button", { name: /^Promote step/ }).last().innerText();
    const step = promote.match(/\d+$/)[0];
    await press(promote);
    await shows(served, new RegExp(`Calls to adder get step ${step}\\b`));
    await press("Follow the newest step");
    await shows(served, /Calls to adder get step 6\b/);
    await calm(opened, REJECTED);
    await opened.close();
  });
});

describe("a run while it trains", () => {
  it("grows on the API's page and in insitu view, and is compared with the first", async () => {
    const trained = real.train();
    const api = await inside("#/runs/timid", real.keys.submit);
    const after = (steps) => until(async () => new RegExp(`timid after ${steps} step`).test(await api.page.locator("main").innerText()), `step ${steps} is not on the page`, 300);
    await until(async () => (await read(viewed.address, "runs")).runs.some((run) => run.name === "timid"), "insitu view does not list the run", 120);
    const key = await keyOf("timid");
    const view = await visit(`#/runs/${key}`);
    const state = view.page.locator("header [role=status]");
    await shows(state, /live/);
    await api.page.reload(); // it was opened before the run was registered
    for (const steps of [1, 2, 3]) await after(steps);
    if (SHOTS) await api.page.screenshot({ path: `${SHOTS}/api-live.png`, fullPage: true });
    assert.equal(await trained, "timid");
    await until(async () => /succeeded/.test(await state.innerText()), "the run has not ended on its page", 60);
    await calm(view);
    await calm(api, /status of 40[14]/);
    await view.close();
    await api.close();
    const first = await keyOf("adder");
    await looksRight("view-compare-runs", (size) => visit(`#/runs/${key}/compare?other=${first}`, size), /paired over[^]*learning_rate/);
  });
});
