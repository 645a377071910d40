// Runs that went wrong, or are odd: each sentence of a page that states a fact, against the run's own files.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, it } from "node:test";

import { launch, open } from "./chromium.mjs";
import { ENV, PYTHON, ROOT } from "./python.mjs";
import { read, report, serve } from "./server.mjs";
import { calm, loaded } from "./visits.mjs";

let browser;
let folder;
let server;
before(async () => {
  folder = mkdtempSync(join(tmpdir(), "insitu-sick-"));
  execFileSync(PYTHON, ["-m", "tests.support.sick_runs", folder], { cwd: ROOT, env: ENV, stdio: ["ignore", "ignore", "ignore"], timeout: 300_000 });
  server = await serve({ directory: folder });
  browser = await launch();
});
after(async () => {
  await browser?.close();
  await server?.stop();
  rmSync(folder, { recursive: true, force: true });
});

const lines = (run, name) =>
  readFileSync(join(folder, run, name), "utf8")
    .trim()
    .split("\n")
    .map((line) => JSON.parse(line));
const steps = (run) => lines(run, "steps.jsonl");
const rollouts = (run) =>
  readdirSync(join(folder, run, "trajectories"))
    .filter((name) => name.endsWith(".jsonl"))
    .flatMap((name) => lines(run, join("trajectories", name)));
const keyOf = async (name) => encodeURIComponent((await read(server.address, "runs")).runs.find((run) => run.path.endsWith(`/${name}`)).key);

/** The figures of the pages: three digits. */
const figure = (value) => String(Number(value.toPrecision(3)));

async function seen(hash, has = "") {
  const opened = await open(browser);
  await opened.page.goto(server.address + hash);
  await opened.page.waitForSelector("main section, main .vtable");
  await loaded(opened.page);
  if (has) await opened.page.waitForFunction((wanted) => document.querySelector("main").innerText.includes(wanted), has);
  const text = (await opened.page.locator("body").innerText()).replaceAll(/\s+/g, " ");
  return { ...opened, text };
}

function has(text, part) {
  assert.ok(text.includes(part), `"${part}" is not in: ${text.slice(0, 3000)}`);
}

describe("a run's page", () => {
  it("of a run whose process was killed says that nobody works on it, and how it goes on", async () => {
    const { text, page, ...opened } = await seen(`#/runs/${await keyOf("stopped")}`, "Training reward");
    const all = steps("stopped");
    has(text, "stopped: no process works on it");
    assert.ok(!/\blive\b/.test(text));
    has(text, "No process works on this run.");
    has(text, "insitu finetune with the same configuration continues it.");
    has(text, `Training reward went from ${figure(all[0].avg_reward)} to ${figure(all.at(-1).avg_reward)}.`);
    has(text, `Too early to tell. After ${all.length} steps.`);
    await calm({ page, ...opened });
    await opened.close();
  });

  it("of a run whose step failed gives the reason", async () => {
    const { text, page, ...opened } = await seen(`#/runs/${await keyOf("failed")}`, "Training reward");
    const failure = lines("failed", "journal.jsonl").at(-1);
    assert.equal(failure.event, "failed");
    has(text, `The run failed: ${failure.message[0].toUpperCase()}${failure.message.slice(1)}.`);
    assert.match(await page.locator("header [role=status]").innerText(), /^failed$/);
    assert.match(await page.locator("header [role=status]").getAttribute("class"), /bad/);
    await calm({ page, ...opened });
    await opened.close();
    const list = await seen("#/", "runs in");
    const chips = await list.page.locator(".verdict .chip.bad").allInnerTexts();
    assert.ok(chips.includes("failed"), chips.join());
    await list.close();
  });

  it("of a run that does not learn gives the verdict once, with its figures", async () => {
    const { text, page, ...opened } = await seen(`#/runs/${await keyOf("not-learning")}`, "Training reward");
    const all = steps("not-learning");
    const { verdict } = all.at(-1);
    assert.equal(verdict.code, "not_learning", verdict.sentence);
    const sentence = verdict.sentence.replace(/^not learning: /, "").replaceAll(/\s+/g, " ");
    has(text, `Not learning. ${sentence[0].toUpperCase()}${sentence.slice(1, 40)}`);
    assert.equal(text.split(sentence.slice(1, 40)).length, 2, "the verdict stands once");
    has(text, `Training reward went from ${figure(all[0].avg_reward)} to ${figure(all.at(-1).avg_reward)}.`);
    const history = JSON.parse(readFileSync(join(folder, "not-learning", "validation_history.json"), "utf8"));
    const gain = history.findLast((entry) => entry.gain)?.gain;
    if (gain) has(text, "Held out, the gain on the same examples is");
    const recent = all.slice(-5);
    const [trained, total] = ["trained", "total"].map((name) => recent.reduce((sum, line) => sum + line.account[name], 0));
    has(text, `In the last 5 steps ${figure((trained / total) * 100)} % of the rollouts taught something`);
    has(text, `Step ${all.at(-1).step}, second by second`);
    has(text, `It had ${all.at(-1).account.total} rollouts in ${all.at(-1).num_groups} groups`);
    has(text, `${all.length} steps · ${rollouts("not-learning").length.toLocaleString("en")} rollouts, validations included`);
    const held = history.at(-1);
    const compared = await seen(`#/runs/${await keyOf("not-learning")}/compare`, "paired over");
    has(compared.text, `before: validation before training ${figure(history[0].avg_reward)}`);
    has(compared.text, `after: validation after step ${held.step} ${figure(held.avg_reward)}`);
    has(compared.text, `paired over ${held.num_examples} examples`);
    await compared.close();
    await calm({ page, ...opened });
    await opened.close();
  });

  it("of 100,000 rollouts draws no conclusion from the part that is read", async () => {
    const key = await keyOf("half-read");
    const all = steps("half-read");
    const view = await read(server.address, `runs/${key}`);
    const { text, page, ...opened } = await seen(`#/runs/${key}`, "Training reward");
    assert.ok(view.run.indexed < 1, "the index is read before anybody could look: the test tests nothing");
    if ((await read(server.address, "runs")).runs.find((run) => run.run_id === "run_large").num_rollouts < 100_000) has(text, "of this run's rollouts so far");
    has(text, `Training reward went from 0 to ${figure(all.at(-1).avg_reward)}.`);
    assert.equal(view.points.length, all.length);
    assert.deepEqual(view.points.map((point) => point.reward.mean), all.map((line) => line.avg_reward));
    for (const point of view.points) {
      const read = Object.keys(point.seconds).length > 0;
      assert.equal(read, point.lengths !== null && point.lengths.count === 128, `step ${point.number} shows times of a part`);
    }
    const known = view.points.filter((point) => point.lengths !== null).map((point) => point.number);
    assert.ok(known.length > 0, "nothing is read yet");
    assert.equal(known.at(-1), all.length, "the newest step is read first");
    has(text, `Step ${all.length}, second by second`);
    assert.ok(!text.includes("No times are known"), "the newest step has its times");
    await calm({ page, ...opened });
    await opened.close();
  });

  it("of a group of 64 shows all of them, and 100 turns of one", async () => {
    const key = await keyOf("large");
    const opened = await seen(`#/runs/${key}/groups/epoch-0001/0`, "one tree");
    has(opened.text, "64 siblings, one tree");
    has(opened.text, "step 2, time 2 of 2");
    assert.equal(await opened.page.getByRole("region", { name: "Siblings" }).locator("tbody tr").count(), 64);
    const of = lines("large", "trajectories/epoch-0001.jsonl");
    const mean = of.reduce((sum, line) => sum + line.reward, 0) / of.length;
    has(opened.text, `Mean reward ${figure(mean)}`);
    const long = of.find((line) => line.generation === 0);
    await opened.close();
    const one = await seen(`#/runs/${key}/rollouts/${encodeURIComponent(long.rollout_id)}`, "Conversation");
    has(one.text, "Conversation, 100 model calls");
    has(one.text, "63 siblings earned more (of 64 rollouts of this example)");
    assert.equal(await one.page.locator("details.turn").count(), 100);
    const scale = /full colour is ± ([\d.]+), the largest in the group/.exec(one.text);
    const { siblings } = await read(server.address, `runs/${key}/rollouts/${encodeURIComponent(long.rollout_id)}?tokens=false`);
    assert.equal(scale[1], figure(Math.max(...siblings.map((sibling) => Math.abs(sibling.advantage)))));
    await calm(one);
    await one.close();
  });

  it("of DPO calls trained only the pair that was", async () => {
    const key = await keyOf("dpo");
    const { account } = steps("dpo")[0];
    assert.equal(account.trained, 4, "a pair of each of two groups");
    const opened = await seen(`#/runs/${key}/groups/epoch-0000/0`, "one tree");
    const rows = await opened.page.getByRole("region", { name: "Siblings" }).locator("tbody tr").allInnerTexts();
    const fates = rows.map((row) => (row.includes("not in a pair") ? "left" : /\btrained\b/.test(row) ? "trained" : row));
    assert.deepEqual(fates, ["trained", "left", "left", "trained"], "the lowest and the highest reward");
    await opened.close();
    const run = await seen(`#/runs/${key}`, "Training reward");
    has(run.text, "% of the rollouts taught something; 50 % were not used: not in a pair");
    await calm(run);
    await run.close();
  });
});

describe("the list of rollouts", () => {
  it("counts in each menu what a choice would show beside the other filters", async () => {
    const key = await keyOf("dpo");
    const opened = await seen(`#/runs/${key}/rollouts?kind=training&text=nothing+has+these+words`, "match the filters");
    has(opened.text, "0 rollouts of");
    const options = (await opened.page.locator("select option").allInnerTexts()).filter((text) => /\(\d/.test(text));
    assert.deepEqual(options, [], "no choice promises rollouts that it would not show");
    await opened.close();
    const trained = await seen(`#/runs/${key}/rollouts?fate=trained`, "match the filters");
    has(trained.text, "12 rollouts of 44 match the filters.");
    assert.ok((await trained.page.locator("select option").allInnerTexts()).includes("not in a pair (12)"));
    await trained.close();
  });
});

describe("a report", () => {
  for (const name of ["not-learning", "large"]) {
    it(`of ${name} has no dead end: every link and every menu of every page`, async () => {
      const file = join(folder, `${name}.html`);
      report({ directory: join(folder, name) }, file);
      const opened = await open(browser);
      const { page } = opened;
      const todo = ["#/"];
      const done = new Set(todo);
      let visits = 0;
      while (todo.length > 0 && visits < 150) {
        const hash = todo.shift();
        visits += 1;
        await page.goto(`file://${file}${hash}`);
        await page.waitForSelector("main section, main .vtable");
        await loaded(page);
        await page.waitForTimeout(30);
        assert.equal(await page.locator("[role=alert]").count(), 0, `${hash}: ${await page.locator("main").innerText()}`);
        assert.equal(await page.locator(".filters:visible").count(), 0, `${hash} has filters that a file cannot follow`);
        for (const link of await page.evaluate(() => [...document.querySelectorAll("a[href^='#/']")].map((each) => each.getAttribute("href")))) {
          if (!done.has(link)) {
            done.add(link);
            todo.push(link);
          }
        }
      }
      assert.ok(done.size > 20, `${done.size} pages`);
      await page.goto(`file://${file}#/`);
      await page.waitForFunction(() => document.body.innerText.includes("Training reward"));
      const text = await page.locator("body").innerText();
      assert.match(text, /This report is one file: it holds \d+ of the run's \d+ groups/);
      assert.ok(!text.includes("send it to somebody"));
      await page.goto(`file://${file}#/runs/run/compare`);
      await page.waitForFunction(() => document.body.innerText.includes("paired over"));
      await page.locator(".vrow a").first().click();
      await page.waitForSelector(".pair");
      await calm(opened);
      await opened.close();
    });
  }
});
