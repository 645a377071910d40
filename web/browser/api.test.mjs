// The pages of the API: the login, and what a session may see and do.
import assert from "node:assert/strict";
import { after, before, describe, it } from "node:test";

import { api } from "./api.mjs";
import { axe, launch, open, overflow, shows, until } from "./chromium.mjs";
import { PAYLOADS } from "./standin.mjs";
import { calm as calmBut, fits, loaded, logIn, SIZES } from "./visits.mjs";

let browser;
let server;
before(async () => {
  [browser, server] = await Promise.all([launch(), api()]);
});
after(async () => {
  await browser?.close();
  await server?.stop();
});

/** Open a page of the API, not logged in. */
async function visit(hash, options) {
  const opened = await open(browser, options);
  await opened.page.goto(server.address + hash);
  await opened.page.waitForSelector("input[type=password]");
  return opened;
}

/** Open a page of the API and log in. */
async function inside(hash, key, options) {
  const opened = await visit(hash, options);
  await logIn(opened.page, key);
  await opened.page.waitForSelector("text=Log out");
  await loaded(opened.page);
  return opened;
}

/** Nothing went wrong but that requests without a session were rejected, as they must be. */
const calm = (opened) => calmBut(opened, /status of 401/);

/** A page at every size and in both colours, without a serious finding of axe. */
async function looksRight(hash, key, text) {
  for (const [width, dark] of SIZES) {
    const opened = await inside(hash, key, { width, dark });
    await shows(opened.page.locator("main"), text);
    await fits(opened.page, hash);
    await calm(opened);
    await opened.close();
  }
}

describe("login", () => {
  it("asks for a key, rejects a wrong one, and keeps the key from the page", async () => {
    const opened = await visit("");
    const { page } = opened;
    assert.deepEqual(await axe(page), []);
    await logIn(page, "wrong");
    await shows(page.locator("main"), /missing or wrong/);
    await logIn(page, server.keys.submit);
    await shows(page.locator("header"), /looker · submit/);
    await shows(page.locator("main"), /adder/);
    assert.equal(await page.evaluate(() => document.cookie), "", "scripts cannot read the session");
    assert.equal(await page.evaluate(() => localStorage.length + sessionStorage.length), 0);
    const [cookie] = await page.context().cookies();
    assert.deepEqual([cookie.httpOnly, cookie.sameSite, cookie.path], [true, "Strict", "/"]);
    assert.ok(!cookie.value.includes(server.keys.submit));
    await page.reload();
    await shows(page.locator("main"), /adder/);
    await calm(opened);
    await page.getByRole("button", { name: "Log out" }).click();
    await page.waitForSelector("input[type=password]");
    await opened.close();
  });

  it("runs: light and dark, narrow and wide", () => looksRight("", server.keys.submit, /2 runs on this backend/));
});

describe("fleet", () => {
  it("shows engines, queues, ranks, processes and the disk, at every size", async () => {
    await looksRight("#/fleet", server.keys.submit, /replica-1[^]*float32[^]*pid 4002[^]*free/);
  });

  it("says how old the report is, and which calls are under way to which version", async () => {
    const opened = await inside("#/fleet", server.keys.submit);
    const main = opened.page.locator("main");
    await shows(main, /its report is .* old/);
    await shows(main, /under way to adder@3\s+4/);
    await shows(main, /succeeded\s+3/);
    await calm(opened);
    await opened.close();
  });
});

describe("run", () => {
  it("shows reward, fates, figures and phases of the steps, at every size", async () => {
    await looksRight("#/runs/adder", server.keys.submit, /adder after 3 steps[^]*Training reward went from 0\.25 to 0\.75[^]*taught something[^]*entropy[^]*Step 3, second by second/);
  });

  it("costs the API less than 5 % of a core while one looks", async () => {
    const opened = await inside("#/runs/adder", server.keys.submit);
    await opened.page.waitForTimeout(3000);
    const [before, began] = [server.cpuSeconds(), Date.now()];
    await opened.page.waitForTimeout(15_000);
    const share = (server.cpuSeconds() - before) / ((Date.now() - began) / 1000);
    console.log(`a page that follows a run costs the API ${(100 * share).toFixed(1)} % of a core`);
    assert.ok(share < 0.05, `${share}`);
    await opened.close();
  });

  it("reads every step by the keyboard", async () => {
    const opened = await inside("#/runs/adder", server.keys.submit);
    await opened.page.getByRole("slider", { name: "Step" }).focus();
    await opened.page.keyboard.press("ArrowLeft");
    await shows(opened.page.locator("main"), /Step 2, second by second[^]*8\.0 s in all, 75 % of it train/);
    await calm(opened);
    await opened.close();
  });

  it("shows a step that is committed while one looks, asks only for what is new, and outlives an API that is away", async () => {
    const opened = await inside("#/runs/puzzle", server.keys.submit);
    const { page } = opened;
    const main = page.locator("main");
    await shows(main, /puzzle after 0 steps[^]*No step is committed yet/);
    server.train("puzzle");
    await shows(main, /puzzle after 1 step\b[^]*Training reward is 0\.25 after one step/);
    await page.route(/\/v1\//, (route) => route.abort());
    await shows(main, /These figures may be old[^]*Training reward is 0\.25/);
    await page.unroute(/\/v1\//);
    server.train("puzzle");
    await page.waitForRequest((sent) => sent.url().endsWith("/v1/runs/puzzle/steps?after=1"), { timeout: 15_000 });
    await shows(main, /puzzle after 2 steps[^]*went from 0\.25 to 0\.5\b/);
    assert.equal(await page.getByText("These figures may be old").count(), 0);
    opened.problems.splice(0, Infinity, ...opened.problems.filter((each) => !each.includes("ERR_FAILED")));
    await calm(opened);
    await opened.close();
  });
});

describe("checkpoints", () => {
  it("shows kept steps, their figures and the served one, at every size", async () => {
    await looksRight("#/runs/adder/checkpoints", server.keys.submit, /Calls to adder get step 3[^]*Step 3[^]*reward\/mean\s+0\.75[^]*Step 1/);
  });

  it("has no buttons without the scope, and says why", async () => {
    const opened = await inside("#/runs/adder/checkpoints", server.keys.submit);
    await shows(opened.page.locator("main"), /need a key with the scope admin/);
    assert.equal(await opened.page.getByRole("button", { name: /Promote|Roll back/ }).count(), 0);
    await opened.close();
  });

  it("promotes, rolls back and follows the newest step through the API, after a second look", async () => {
    const opened = await inside("#/", server.keys.admin);
    const { page } = opened;
    const press = (name) => page.getByRole("button", { name, exact: true }).click();
    const served = page.locator("main h2").first();
    await page.getByRole("link", { name: "adder" }).click();
    await page.getByRole("link", { name: "Checkpoints" }).click();
    await press("Promote step 1");
    await press("Cancel");
    await shows(page.locator("main"), /They follow the newest step/);
    for (const step of [1, 2]) {
      await press(`Promote step ${step}`);
      await press(`Yes: Promote step ${step}`);
      await shows(served, new RegExp(`Calls to adder are to get step ${step}\\b`));
      await shows(page.locator("main"), /Not served yet: /); // there is no supervisor to serve it
    }
    assert.equal(await server.promoted("adder"), 2);
    await page.waitForRequest((sent) => sent.url().endsWith("/promotions") && sent.method() === "GET", { timeout: 10_000 });
    await press("Roll back");
    await press("Yes: Roll back");
    await shows(served, /Calls to adder are to get step 1\b/);
    assert.equal(await server.promoted("adder"), 1);
    await press("Follow the newest step");
    await press("Yes: Follow the newest step");
    await shows(served, /Calls to adder (are to )?get step 3\b/);
    assert.equal(await server.promoted("adder"), null);
    await calm(opened);
    await opened.close();
  });

  it("prints an export command that insitu understands", async () => {
    const opened = await inside("#/runs/adder/checkpoints", server.keys.submit);
    const command = await opened.page.locator("code").first().innerText();
    assert.match(command, /^insitu export adder@3 adder-3 --url http:\/\/127\.0\.0\.1:\d+$/);
    // The stand-in's checkpoints hold no files, so the API answers that there is nothing to export.
    assert.throws(() => server.run(command), /adder@3|manifest|checkpoint/);
    await opened.close();
  });
});

describe("hostile texts", () => {
  const KEYED = new Set(["versions", "jobs", "metrics"]);

  /** The same answer with a payload for every text in it, and for every name that is a key. */
  function hostile(value, used, within = "") {
    const payload = () => {
      const next = PAYLOADS[used.length % PAYLOADS.length];
      used.push(next);
      return next;
    };
    if (typeof value === "string") return payload();
    if (Array.isArray(value)) return value.map((each) => hostile(each, used));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [KEYED.has(within) ? payload() : name, hostile(each, used, name)]));
  }

  /** Let the API answer, and put the payloads into its answer; the pages and their policy stay its own. */
  async function poisoned(page, kept = {}) {
    const used = [];
    await page.route(/\/(session|v1\/.*)$/, async (route) => {
      const answer = await route.fetch();
      const json = answer.ok() ? { ...hostile(await answer.json(), used), ...(route.request().url().endsWith("/session") ? kept : {}) } : await answer.json();
      await route.fulfill({ response: answer, json });
    });
    return used;
  }

  async function staysText(opened) {
    const { page } = opened;
    const made = await page.evaluate(() => document.querySelectorAll("body script, body img, body iframe, body style, body object, body base, body meta, body math, body [onload], body [onerror], body [onclick], body a[href^=javascript]").length);
    assert.equal(made, 0);
    assert.ok((await overflow(page)) <= 0);
    await calm(opened);
  }

  for (const [name, hash, least] of [["runs", "#/", 4], ["fleet", "#/fleet", 12], ["run", "#/runs/adder", 3], ["checkpoints", "#/runs/adder/checkpoints", 4]]) {
    it(`${name}: every text of the answers stays text`, async () => {
      const opened = await inside(hash, server.keys.admin, { width: name === "fleet" ? 380 : 1280 });
      const { page } = opened;
      const used = await poisoned(page, { scopes: ["admin"] });
      await page.reload();
      await page.waitForSelector("text=Log out");
      const shown = async () => {
        const text = await page.evaluate(() => document.body.textContent);
        return new Set(used.filter((payload) => text.includes(payload))).size;
      };
      await until(async () => (await shown()) >= least, async () => `${await shown()} of ${used.length} payloads are on the page`);
      await staysText(opened);
      await opened.close();
    });
  }

  it("login and promotion: an error stays text", async () => {
    const opened = await visit("");
    const { page } = opened;
    const problem = (index) => ({ status: 400, json: { error: { type: PAYLOADS[index], message: PAYLOADS[index + 1], hint: PAYLOADS[index + 2] } } });
    await page.route(/\/login$/, (route) => route.fulfill(problem(10)));
    await logIn(page, PAYLOADS[0]);
    await until(async () => (await page.getByRole("alert").textContent()).includes(PAYLOADS[12]), "the error is not on the page");
    assert.ok((await page.getByRole("alert").textContent()).includes(PAYLOADS[11]));
    await page.unroute(/\/login$/);
    await page.route(/\/promoted\/1$/, (route) => route.fulfill(problem(30)));
    await logIn(page, server.keys.admin);
    await page.getByRole("link", { name: "adder" }).click();
    await page.getByRole("link", { name: "Checkpoints" }).click();
    await page.getByRole("button", { name: "Promote step 1", exact: true }).click();
    await page.getByRole("button", { name: "Yes: Promote step 1", exact: true }).click();
    await until(async () => (await page.evaluate(() => document.body.textContent)).includes(PAYLOADS[31]), "the error is not on the page");
    opened.problems.splice(0, Infinity, ...opened.problems.filter((each) => !each.includes("status of 400")));
    await staysText(opened);
    await opened.close();
  });
});

describe("the end of a session", () => {
  it("a revoked key leads back to the login", async () => {
    const opened = await inside("#/fleet", server.keys.submit);
    server.run("insitu keys revoke looker");
    await opened.page.waitForSelector("input[type=password]");
    await opened.close();
  });
});
