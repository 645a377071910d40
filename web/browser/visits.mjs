// What the tests of all pages share: sizes, waiting for what was loaded, the login, and that nothing went wrong.
import assert from "node:assert/strict";

import { axe, overflow } from "./chromium.mjs";

/** Width, and whether it is dark. */
export const SIZES = [[1280, false], [1280, true], [380, false], [380, true]];

/** Wait until nothing of the page is being loaded. */
export function loaded(page) {
  return page.waitForFunction(() => !document.querySelector("main")?.textContent.includes("Loading "));
}

export async function logIn(page, key) {
  await page.getByLabel("key").fill(key);
  await page.keyboard.press("Enter");
}

/** Nothing went wrong in the page, but for problems that are `expected`. */
export async function calm({ problems, violations, page }, expected = /^$/) {
  assert.deepEqual(problems.filter((problem) => !expected.test(problem)), []);
  assert.deepEqual(await violations(), []);
  assert.equal(await page.evaluate(() => window.hit), undefined);
}

/** The page is not wider than the window, and axe finds nothing serious. */
export async function fits(page, name) {
  assert.ok((await overflow(page)) <= 0, `${name} is wider than ${page.viewportSize().width} pixels`);
  assert.deepEqual(await axe(page), [], name);
}
