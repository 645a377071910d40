// Every page over a stand-in for the server: hostile texts, sizes, keyboard, and a connection that breaks.
import assert from "node:assert/strict";
import { after, before, describe, it } from "node:test";

import { axe, launch, open, overflow, shows, until } from "./chromium.mjs";
import { NOT_KEPT, PAYLOADS, standin } from "./standin.mjs";
import { calm, loaded } from "./visits.mjs";

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
  await loaded(opened.page);
  return { ...opened, took: Date.now() - began };
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

describe("going on from a fork", () => {
  let server;
  before(async () => {
    server = await standin({ rollouts: 500, tokens: 40, steps: 20 });
  });
  after(() => server?.stop());

  for (const [width, dark] of [[1280, false], [380, true]]) {
    it(`draws what was sampled as branches of the tree, by keyboard, ${width} pixels wide`, async () => {
      const opened = await visit(server, PAGES.group, { width, dark });
      const { page } = opened;
      const button = page.getByRole("button", { name: "Go on from the fork 5 tokens after the prompt" });
      assert.equal(await button.count(), 1, "the siblings part once");
      await button.press("Enter");
      assert.equal(await page.evaluate(() => document.activeElement.tagName), "SELECT", "the form has the focus");
      await page.getByLabel("With").selectOption("step 18");
      await page.getByLabel("answers").fill("3");
      await page.getByLabel("of at most").fill("6");
      await page.keyboard.press("Enter");
      await page.waitForSelector(".tree li.again");
      const asked = server.asked.filter((url) => url.includes("/resample")).pop();
      assert.equal(asked, "/view/v1/runs/r/groups/epoch-0000/3/resample?rollout=run.e0.0&sequence=0&depth=50&step=18&count=3&max_tokens=6");
      const branches = page.locator(".tree li.again");
      assert.deepEqual(await branches.locator(".t").count(), 18);
      assert.deepEqual((await branches.locator(".leaf").allInnerTexts()).map((text) => text.replaceAll(/\s+/g, " ").trim()), ["0 re-sampled by step 18", "stop re-sampled by step 18", "0.2 re-sampled by step 18"]);
      await branches.first().locator(".t").nth(2).click();
      await shows(page.locator(".detail"), /re-sampled: not trained on, no advantage · logprob .* · sampled by adder@3/);
      await shows(page.locator("main"), /exactly the 50 tokens before the fork.*as likely as in the record \(difference 0\.0004\)/s);
      await shows(page.locator("main"), /The reward gave no score\. KeyError: 'x'/);
      assert.ok((await overflow(page)) <= 0);
      assert.deepEqual(await axe(page), []);
      await page.getByLabel("With").selectOption("the base model");
      await page.getByRole("button", { name: "Sample" }).press("Enter");
      await page.waitForFunction(() => document.querySelectorAll(".tree li.again").length === 3);
      assert.ok(!server.asked.filter((url) => url.includes("/resample")).pop().includes("step="));
      await calm(opened);
      await opened.close();
    });
  }

  it("says in the server's words why nothing was sampled, and asks for nothing beyond its bounds", async () => {
    const opened = await visit(server, PAGES.group);
    const { page } = opened;
    await page.getByRole("button", { name: /^Go on from the fork/ }).click();
    const before = server.asked.length;
    for (const [label, value] of [["answers", "9"], ["answers", ""], ["of at most", "4097"]]) {
      const kept = await page.getByLabel(label).inputValue();
      await page.getByLabel(label).fill(value);
      await page.getByRole("button", { name: "Sample" }).click();
      assert.equal(await page.evaluate(() => document.querySelector("form").checkValidity()), false);
      await page.getByLabel(label).fill(kept);
    }
    assert.equal(server.asked.length, before);
    await page.getByLabel("With").selectOption(`step ${NOT_KEPT}`);
    await page.getByRole("button", { name: "Sample" }).click();
    await shows(page.getByRole("alert"), /Nothing was sampled\. step 2 of run 'adder' is not kept; kept are 0, 3\s+pin a step to keep it/);
    assert.equal(await page.locator(".tree li.again").count(), 0);
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
    await shows(page.locator(".readout").first(), /step 0: held out/);
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

  it("group: what is sampled from a fork stays text, and so does an error", async () => {
    const opened = await visit(server, PAGES.group);
    const { page } = opened;
    await page.getByRole("button", { name: /^Go on from the fork/ }).click();
    await page.getByRole("button", { name: "Sample" }).click();
    await page.waitForSelector(".tree li.again");
    const text = await page.evaluate(() => document.querySelector("main").textContent);
    for (const index of [0, 5, 52, 53, 55, 56, 57]) assert.ok(text.includes(PAYLOADS[index]), `payload ${index} is not on the page`);
    assert.ok((await overflow(page)) <= 0);
    await calm(opened);
    await page.getByLabel("With").selectOption(`step ${NOT_KEPT}`);
    await page.getByRole("button", { name: "Sample" }).click();
    const alert = await page.getByRole("alert").textContent();
    for (const index of [58, 59]) assert.ok(alert.includes(PAYLOADS[index]), `payload ${index} is not in the error`);
    assert.deepEqual(await opened.violations(), []);
    assert.equal(await page.evaluate(() => window.hit), undefined);
    await opened.close();
  });

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
