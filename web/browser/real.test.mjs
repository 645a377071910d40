// Every page over `insitu view` and a run directory that `insitu finetune` wrote.
import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, it } from "node:test";

import { axe, launch, open, overflow, shows } from "./chromium.mjs";
import { aLiveRun, aRun, read, report, serve } from "./server.mjs";
import { calm, loaded } from "./visits.mjs";

let browser;
let run;
let server;
let key;
let pages;
before(async () => {
  run = aRun();
  server = await serve(run);
  browser = await launch();
  const list = await read(server.address, "runs");
  key = encodeURIComponent(list.runs[0].key);
  const groups = await read(server.address, `runs/${key}/groups?sort=spread&limit=1&kind=training`);
  const [group] = groups.groups;
  const rollouts = await read(server.address, `runs/${key}/rollouts?limit=1&index=${group.index}&store=${group.store}`);
  const failed = await read(server.address, `runs/${key}/rollouts?limit=1&reason=failed`);
  pages = {
    runs: ["#/", "Runs"],
    run: [`#/runs/${key}`, "Reward"],
    rollouts: [`#/runs/${key}/rollouts`, "Rollouts"],
    rollout: [`#/runs/${key}/rollouts/${encodeURIComponent(rollouts.rollouts[0].rollout_id)}`, "tokens"],
    failed: [`#/runs/${key}/rollouts/${encodeURIComponent(failed.rollouts[0].rollout_id)}`, "traceback"],
    groups: [`#/runs/${key}/groups`, "Groups"],
    group: [`#/runs/${key}/groups/${group.store}/${group.index}`, "one tree"],
    compare: [`#/runs/${key}/compare`, "paired over"],
  };
});
after(async () => {
  await browser?.close();
  await server?.stop();
  run?.remove();
});

async function visit(hash, text, options, base = server.address) {
  const opened = await open(browser, options);
  await opened.page.goto(base + hash);
  await opened.page.waitForFunction((wanted) => document.body.textContent.includes(wanted), text);
  await loaded(opened.page);
  return opened;
}

describe("a real run", () => {
  for (const name of ["runs", "run", "rollouts", "rollout", "failed", "groups", "group", "compare"]) {
    it(`${name}: light and dark, narrow and wide`, async () => {
      const [hash, text] = pages[name];
      for (const [width, dark] of [[1280, false], [380, true], [1280, true], [380, false]]) {
        const opened = await visit(hash, text, { width, dark });
        assert.ok((await overflow(opened.page)) <= 0, `${name} is wider than ${width} pixels`);
        if (width === 1280) assert.deepEqual(await axe(opened.page), []);
        await calm(opened);
        await opened.close();
      }
    });
  }

  it("the tree spells what each sibling wrote, with its own advantage", async () => {
    const [hash, text] = pages.group;
    const [, , , , store, index] = hash.split("/");
    const group = await read(server.address, `runs/${key}/groups/${store}/${index}`);
    const opened = await visit(hash, text);
    const drawn = await opened.page.evaluate(() =>
      [...document.querySelectorAll(".leaf")].map((leaf) => {
        const path = [];
        for (let node = leaf.closest("li"); node; node = node.parentElement.closest("li")) path.unshift(...[...node.querySelectorAll(":scope > .seg > .t")].map((token) => token.textContent));
        return { name: leaf.querySelector("a").textContent, advantage: leaf.querySelector(".num").textContent, text: path.join("") };
      }),
    );
    const { tree } = group;
    const expected = tree.branches.map((branch) => {
      const ids = [];
      for (let node = tree.nodes[branch.node]; node; node = node.parent === null ? null : tree.nodes[node.parent]) ids.unshift(...node.texts);
      const sibling = tree.siblings[branch.sibling];
      return { name: `#${sibling.generation}`, advantage: sibling.advantage, text: ids.slice(tree.num_prompt_tokens).join("").replaceAll(" ", "·").replaceAll("\n", "⏎") };
    });
    assert.ok(expected.length > 1);
    for (const entry of expected) {
      const shown = drawn.find((leaf) => leaf.name === entry.name);
      assert.equal(shown?.text, entry.text);
      if (entry.advantage !== null) assert.equal(Number(shown.advantage.replace("−", "-")), Number(entry.advantage.toFixed(2)));
    }
    await calm(opened);
    await opened.close();
  });

  it("a model's markup is text", async () => {
    const found = await read(server.address, `runs/${key}/rollouts?limit=1&text=${encodeURIComponent("<script>")}`);
    assert.ok(found.total > 0, "no rollout of the run has markup: the test tests nothing");
    const opened = await visit(`#/runs/${key}/rollouts?text=${encodeURIComponent("<script>")}`, "<script>");
    await calm(opened);
    await opened.close();
  });

  it("the slider walks through the steps and keeps the focus", async () => {
    const [hash, text] = pages.group;
    const opened = await visit(hash, text);
    const slider = opened.page.locator(".slide input");
    await slider.focus();
    const before = await opened.page.evaluate(() => location.hash);
    await opened.page.keyboard.press((await slider.inputValue()) === "0" ? "ArrowRight" : "ArrowLeft");
    await opened.page.waitForFunction((old) => location.hash !== old, before);
    assert.equal(await opened.page.evaluate(() => document.activeElement.type), "range");
    await opened.page.waitForTimeout(300);
    await calm(opened);
    await opened.close();
  });

  it("executes nothing that a run directory names", async () => {
    const opened = await visit(...pages.group);
    assert.equal(await opened.page.getByRole("button", { name: "Score again" }).count(), 0);
    await shows(opened.page.locator("main"), /start insitu view config\.yml with your own configuration/);
    await opened.close();
  });

  it("scores a group again with the reward on disk, for whoever names a configuration", async () => {
    const own = await serve({ ...run, directory: run.config });
    try {
      const [{ key: ownKey }] = (await read(own.address, "runs")).runs;
      const [hash, text] = [pages.group[0].replace(`/runs/${key}/`, `/runs/${encodeURIComponent(ownKey)}/`), pages.group[1]];
      const [, , , , store, index] = hash.split("/");
      const group = await read(own.address, `runs/${encodeURIComponent(ownKey)}/groups/${store}/${index}`);
      for (const width of [1280, 380]) {
        const opened = await visit(hash, text, { width }, own.address);
        await opened.page.getByRole("button", { name: "Score again" }).press("Enter");
        const table = opened.page.getByRole("region", { name: "Siblings, scored again" });
        await table.waitFor({ timeout: 90_000 });
        const rows = await table.locator("tbody tr").evaluateAll((found) => found.map((row) => [...row.cells].map((cell) => cell.textContent.trim())));
        assert.deepEqual(rows.map((cells) => cells[0]), group.tree.siblings.map((sibling) => `#${sibling.generation}`));
        for (const [, reward, now, advantage, advantageNow] of rows) assert.deepEqual([reward, advantage], [now, advantageNow], "the reward is that of the run");
        await shows(opened.page.locator("main"), /gives every sibling the reward that it had/);
        assert.ok((await overflow(opened.page)) <= 0);
        if (width === 1280) assert.deepEqual(await axe(opened.page), []);
        await calm(opened);
        await opened.close();
      }
    } finally {
      await own.stop();
    }
  });

  it("has no such button where nothing was trained", async () => {
    const found = await read(server.address, `runs/${key}/groups?limit=1&kind=validation`);
    const [group] = found.groups;
    const opened = await visit(`#/runs/${key}/groups/${group.store}/${group.index}`, "one tree");
    assert.equal(await opened.page.getByRole("button", { name: "Score again" }).count(), 0);
    await opened.close();
  });

  it("says which figure is not there", async () => {
    const [hash, text] = pages.rollout;
    const opened = await visit(`${hash}?colour=difference`, text);
    assert.match(await opened.page.locator("main").innerText(), /trainer's logprob of each token is not kept/);
    await opened.close();
  });
});

describe("a run whose backend is there", () => {
  it("goes on from a fork by the base model and by a step, and says which steps are kept", async () => {
    const live = await aLiveRun();
    let own;
    try {
      own = await serve(live);
      const [{ key: name }] = (await read(own.address, "runs")).runs;
      const { groups } = await read(own.address, `runs/${name}/groups?sort=spread&kind=training`);
      const group = groups.find((each) => each.index % 2); // one turn, whose answer is the agent's output
      const opened = await visit(`#/runs/${name}/groups/${group.store}/${group.index}`, "one tree", {}, own.address);
      const { page } = opened;
      await page.getByRole("button", { name: /^Go on from the fork/ }).first().press("Enter");
      await page.getByLabel("answers").fill("2");
      const sample = async (by) => {
        await page.getByLabel("With").selectOption(by);
        await page.getByRole("button", { name: "Sample" }).press("Enter");
        await page.waitForSelector("[aria-busy=true]");
        await page.waitForFunction(() => !document.querySelector("[aria-busy=true]"), null, { timeout: 150_000 });
        return (await page.locator(".tree li.again .leaf").allInnerTexts()).map((text) => text.replaceAll(/\s+/g, " "));
      };
      for (const [by, named] of [["the base model", "the base model"], ["step 4", "step 4"]]) {
        const leaves = await sample(by);
        assert.equal(leaves.length, 2);
        for (const leaf of leaves) assert.match(leaf, new RegExp(`^(0|0\\.1|0\\.3|1) re-sampled by ${named}$`), "with the score of the reward on disk");
      }
      assert.deepEqual(await axe(page), []);
      await calm(opened);
      await sample("step 1");
      assert.match(await page.getByRole("alert").innerText(), /step 1 of run 'small' is not kept; kept are 0, 2, 3, 4/);
      await opened.close();
    } finally {
      await own?.stop();
      await live.remove();
    }
  });
});

describe("a run under way", () => {
  it("comes back to life when the server does", async () => {
    const folder = mkdtempSync(join(tmpdir(), "insitu-live-"));
    cpSync(run.directory, join(folder, "output"), { recursive: true });
    const journal = join(folder, "output", "journal.jsonl");
    const lines = readFileSync(journal, "utf8").trimEnd().split("\n");
    const end = lines.pop();
    writeFileSync(journal, `${lines.join("\n")}\n`);
    let live = await serve({ directory: join(folder, "output"), tokenizer: run.tokenizer });
    const crashed = await visit(`#/runs/${key}`, "Reward", {}, live.address);
    const chip = crashed.page.locator("header [role=status]");
    assert.equal(await chip.innerText(), "stopped: no process works on it", "a run that crashed is not live");
    assert.match(await chip.getAttribute("class"), /bad/);
    await crashed.close();
    writeFileSync(join(folder, "output", ".lock"), String(process.pid));
    const opened = await visit(`#/runs/${key}`, "Reward", {}, live.address);
    const state = (wanted) => opened.page.waitForFunction((text) => document.querySelector("header [role=status]").textContent.includes(text), wanted, { timeout: 40_000 });
    try {
      await state("live");
      await live.stop("SIGKILL");
      await state("lost");
      live = await serve({ directory: join(folder, "output"), tokenizer: run.tokenizer }, live.port);
      await state("live");
      writeFileSync(journal, `${lines.join("\n")}\n${end}\n`);
      await state("succeeded");
      assert.deepEqual(opened.problems.filter((problem) => !/ERR_|Failed to load resource/.test(problem)), []);
      assert.deepEqual(await opened.violations(), []);
    } finally {
      await opened.close();
      await live.stop();
      rmSync(folder, { recursive: true, force: true });
    }
  });
});

describe("a report", () => {
  let folder;
  let file;
  before(() => {
    folder = mkdtempSync(join(tmpdir(), "insitu-report-"));
    file = `file://${join(folder, "report.html")}`;
    report(run, join(folder, "report.html"));
  });
  after(() => rmSync(folder, { recursive: true, force: true }));

  it("shows its pages without a server", async () => {
    for (const [hash, text] of [["#/", "Reward"], ["#/runs/run", "Reward"], ["#/runs/run/rollouts", "Rollouts"], ["#/runs/run/groups", "Groups"], ["#/runs/run/compare", "paired over"]]) {
      const opened = await visit(hash, text, {}, file);
      const asked = [];
      opened.page.on("request", (request) => asked.push(request.url()));
      assert.match(await opened.page.textContent("main"), /it holds 5 of the run's \d+ groups/);
      await opened.page.waitForTimeout(300);
      assert.deepEqual(asked, []);
      await calm(opened);
      await opened.close();
    }
  });

  it("opens each of its groups, and says what it does not hold", async () => {
    const opened = await visit("#/runs/run/groups", "Groups", {}, file);
    const links = await opened.page.evaluate(() => [...document.querySelectorAll("a")].map((link) => link.getAttribute("href")).filter((to) => /groups\/[^/]+\/\d+$/.test(to ?? "")));
    assert.equal(new Set(links).size, 5);
    for (const link of new Set(links)) {
      await opened.page.goto(file + link);
      await opened.page.waitForFunction(() => document.body.textContent.includes("one tree"));
      assert.equal(await opened.page.getByRole("button", { name: "Score again" }).count(), 0);
    }
    await opened.page.goto(`${file}#/runs/run/rollouts?sort=best`);
    await opened.page.waitForFunction(() => document.body.textContent.includes("This is not in the report."));
    await calm(opened);
    await opened.close();
  });
});
