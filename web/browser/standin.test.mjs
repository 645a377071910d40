// Every page over a stand-in for the server: hostile texts, sizes, keyboard, and a connection that breaks.
import assert from "node:assert/strict";
import { after, before, describe, it } from "node:test";

import { axe, launch, open, overflow, shows, until } from "./chromium.mjs";
import { PAYLOADS, standin } from "./standin.mjs";

const PAGES = {
  runs: "#/",
  run: "#/runs/r",
  rollouts: "#/runs/r/rollouts",
  rollout: "#/runs/r/rollouts/run.e0.3",
  groups: "#/runs/r/groups",
  group: "#/runs/r/groups/epoch-0000/3",
  compare: "#/runs/r/compare?example=e0",
};
const OPENS_WITHIN_MS = 2000;

let browser;
before(async () => {
  browser = await launch();
});
after(() => browser?.close());

/** Open a page and wait until it shows what it has loaded. */
async function visit(server, hash, options) {
  const opened = await open(browser, options);
  const began = Date.now();
  await opened.page.goto(server.address + hash);
  await opened.page.waitForSelector("main section, main .vtable");
  await opened.page.waitForFunction(() => !document.querySelector("main")?.textContent.includes("Loading "));
  return { ...opened, took: Date.now() - began };
}

async function calm({ problems, violations, page }) {
  assert.deepEqual(problems, []);
  assert.deepEqual(await violations(), []);
  assert.equal(await page.evaluate(() => window.hit), undefined);
}

/** Wait for a part of the address; a function, because the pages' policy forbids the evaluation of strings. */
function inAddress(page, part) {
  return page.waitForFunction((wanted) => location.hash.includes(wanted), part);
}

/** Open everything that is folded or cut short. */
async function openAll(page) {
  for (let turn = 0; turn < 3; turn += 1) {
    await page.evaluate(() => {
      for (const folded of document.querySelectorAll("main details")) folded.open = true;
      for (const button of document.querySelectorAll("main .turn button.more")) button.click();
    });
    await page.waitForTimeout(150);
  }
}

describe("100,000 rollouts of 2,000 tokens", () => {
  let server;
  before(async () => {
    server = await standin();
  });
  after(() => server?.stop());

  for (const [name, hash] of Object.entries(PAGES)) {
    it(`${name}: light and dark, narrow and wide, without a serious finding of axe`, async () => {
      let fastest = Infinity;
      for (const [width, dark] of [[1280, false], [1280, true], [380, false], [380, true]]) {
        const opened = await visit(server, hash, { width, dark });
        fastest = Math.min(fastest, opened.took);
        assert.ok((await overflow(opened.page)) <= 0, `${name} is wider than ${width} pixels`);
        if (width === 1280 || !dark) assert.deepEqual(await axe(opened.page), []);
        await calm(opened);
        await opened.close();
      }
      // Of four, because the machine may be busy with something else.
      assert.ok(fastest < OPENS_WITHIN_MS, `${name} took ${fastest} ms`);
    });
  }

  it("rollouts: the table holds the rows in sight alone, and loads as one scrolls", async () => {
    const opened = await visit(server, PAGES.rollouts);
    const { page } = opened;
    const rows = () => page.locator(".vrow").count();
    assert.ok((await rows()) < 60, `${await rows()} rows in the document`);
    const last = async () => Number(await page.locator(".vrow [data-row]").last().getAttribute("data-row"));
    await until(
      async () => {
        await page.locator(".vtable").evaluate((box) => (box.scrollTop = box.scrollHeight));
        return (await last()) > 500;
      },
      async () => `the table ends at row ${await last()}`,
    );
    assert.ok((await rows()) < 60, `${await rows()} rows in the document`);
    await calm(opened);
    await opened.close();
  });

  it("rollout: tokens far from the screen are not in the document", async () => {
    const opened = await visit(server, PAGES.rollout);
    const { page } = opened;
    const tokens = () => page.locator(".tokens .t").count();
    assert.match(await page.locator("main").innerText(), /4,200 tokens/);
    assert.ok((await tokens()) < 2500, `${await tokens()} tokens in the document`);
    await page.locator(".tokens.box").focus();
    await page.keyboard.press("End");
    await page.waitForSelector(".t.at");
    await shows(page.locator(".detail"), /Token 4200 of 4200/);
    await page.waitForTimeout(300);
    assert.ok((await tokens()) < 2500, `${await tokens()} tokens in the document`);
    await calm(opened);
    await opened.close();
  });
});

describe("keyboard alone", () => {
  let server;
  before(async () => {
    server = await standin({ rollouts: 500, tokens: 40, steps: 20 });
  });
  after(() => server?.stop());

  it("goes from the list of runs to a token's figures", async () => {
    const opened = await visit(server, PAGES.runs);
    const { page } = opened;
    const press = async (key, until) => {
      for (let turn = 0; turn < 60; turn += 1) {
        await page.keyboard.press(key);
        if (await page.evaluate(until)) return;
      }
      assert.fail(`${until} never held`);
    };
    await press("Tab", `document.activeElement.textContent === "stand-in"`);
    await page.keyboard.press("Enter");
    await page.waitForSelector("text=Where the rollouts");
    await press("Tab", `document.activeElement.getAttribute("aria-roledescription") === "chart"`);
    await page.keyboard.press("ArrowRight");
    await shows(page.locator(".readout").first(), /after step 0: training/);
    await press("Shift+Tab", `document.activeElement.textContent === "Rollouts"`);
    await page.keyboard.press("Enter");
    await page.waitForSelector(".vrow");
    await press("Tab", `document.activeElement.dataset.row === "0"`);
    for (let row = 0; row < 30; row += 1) await page.keyboard.press("ArrowDown");
    await page.waitForFunction(() => document.activeElement.dataset.row === "30");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".tokens.box");
    await press("Tab", `document.activeElement.type === "radio"`);
    await page.keyboard.press("ArrowRight");
    await inAddress(page, "colour=logprob");
    await press("Tab", `document.activeElement.getAttribute("aria-roledescription") === "tokens"`);
    await page.keyboard.press("ArrowRight");
    await shows(page.locator(".detail"), /Token 1 of/);
    await calm(opened);
    await opened.close();
  });

  it("moves through the tree and along the steps of a group", async () => {
    const opened = await visit(server, PAGES.group);
    const { page } = opened;
    await page.locator(".tree").focus();
    for (let turn = 0; turn < 7; turn += 1) await page.keyboard.press("ArrowRight");
    await shows(page.locator(".detail"), /advantage .* shared by 1 sibling/);
    await page.locator(".slide input").focus();
    await page.keyboard.press("ArrowRight");
    await inAddress(page, "groups/epoch-0000/95");
    assert.equal(await page.evaluate(() => document.activeElement.type), "range");
    await page.keyboard.press("Tab");
    await calm(opened);
    await opened.close();
  });

  it("keeps filters in the address", async () => {
    const opened = await visit(server, PAGES.rollouts);
    const { page } = opened;
    await page.getByRole("searchbox").fill("seven & eight");
    await inAddress(page, "text=seven");
    await page.getByLabel("order").selectOption("best");
    await inAddress(page, "sort=best");
    await page.getByLabel("where it went").selectOption("reason:zero_variance");
    await inAddress(page, "reason=zero_variance");
    const asked = () => new URL(server.asked.filter((url) => url.includes("/rollouts?")).at(-1), "http://x").searchParams;
    await until(
      () => asked().get("text") === "seven & eight" && asked().get("sort") === "best" && asked().get("reason") === "zero_variance",
      () => `the server was asked for ${asked()}`,
    );
    await page.reload();
    await page.waitForSelector(".vrow");
    assert.equal(await page.getByRole("searchbox").inputValue(), "seven & eight");
    await calm(opened);
    await opened.close();
  });
});

describe("hostile texts", () => {
  let server;
  before(async () => {
    server = await standin({ hostile: true, rollouts: 100, tokens: 120, steps: 6 });
  });
  after(() => server?.stop());

  for (const [name, hash] of Object.entries({ ...PAGES, compare: `#/runs/r/compare?example=${encodeURIComponent(PAYLOADS[52])}`, missing: `#/runs/${encodeURIComponent(PAYLOADS[0])}`, nowhere: `#/runs/r/${encodeURIComponent(PAYLOADS[1])}` })) {
    it(`${name}: texts stay texts`, async () => {
      const opened = await open(browser);
      const { page } = opened;
      await page.goto(server.address + hash);
      await page.waitForSelector("main section");
      await openAll(page);
      for (const box of await page.locator(".vtable, .tokens.box").all()) await box.evaluate((element) => (element.scrollTop = element.scrollHeight));
      await page.waitForTimeout(200);
      const made = await page.evaluate(() => document.querySelectorAll("main script, main img, main iframe, main style, main object, main base, main meta, main math, main [onload], main [onerror], main [onclick], main a[href^=javascript]").length);
      assert.equal(made, 0);
      assert.ok((await page.evaluate(() => document.body.textContent)).includes("window.hit=1"), "no payload on the page: the test tests nothing");
      assert.deepEqual(await opened.violations(), []);
      assert.equal(await page.evaluate(() => window.hit), undefined);
      assert.deepEqual(opened.problems.filter((problem) => !problem.includes("404")), []);
      assert.ok((await overflow(page)) <= 0);
      await opened.close();
    });
  }

  it("a rollout shows all hundred payloads, word for word", async () => {
    const opened = await visit(server, PAGES.rollout);
    await openAll(opened.page);
    const text = await opened.page.evaluate(() => document.querySelector("main").textContent);
    assert.deepEqual(PAYLOADS.filter((payload) => !text.includes(payload)), []);
    await calm(opened);
    await opened.close();
  });
});

describe("a live run", () => {
  it("takes up where it was after the connection broke, and says so meanwhile", async () => {
    const server = await standin({ steps: 10, rollouts: 640 });
    const opened = await visit(server, PAGES.run);
    const { page } = opened;
    const state = page.locator("header [role=status]");
    await page.waitForFunction(() => document.querySelector("header [role=status]").textContent === "live");
    server.send("7", "rollouts", { num_rollouts: 700 });
    await page.waitForFunction(() => document.querySelector("main").textContent.includes("700 rollouts"));
    const views = () => server.asked.filter((url) => url === "/view/v1/runs/r").length;
    const seen = views();
    server.send("8", "step", { num_rollouts: 704 });
    await until(() => views() > seen, "no new view of the run after a step");
    await page.waitForTimeout(2500);
    assert.equal(views(), seen + 1, "a step is one new view of the run");
    server.cut();
    await page.waitForFunction(() => document.querySelector("header [role=status]").textContent.includes("lost"));
    await page.waitForFunction(() => document.querySelector("header [role=status]").textContent === "live", null, { timeout: 10_000 });
    assert.match(server.asked.filter((url) => url.includes("/events")).at(-1), /after=8$/);
    server.send("9", "ended", { num_rollouts: 710 });
    await page.waitForFunction(() => !["live", ""].includes(document.querySelector("header [role=status]").textContent));
    await until(() => server.streams.size === 0, "the stream of an ended run is open");
    assert.ok(await state.isVisible());
    await opened.close();
    await server.stop();
  });
});
