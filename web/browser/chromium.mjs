// Debian's Chromium, driven by playwright-core; every page reports its errors and policy violations.
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";

import { chromium } from "playwright-core";

const PLACES = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"];

export async function launch() {
  const place = PLACES.find((path) => path && existsSync(path));
  if (!place) throw new Error("no Chromium here: apt-get install chromium, or name one in CHROMIUM");
  return chromium.launch({ executablePath: place, headless: true, args: FLAGS });
}

/** A page with a list of everything that went wrong in it. */
export async function open(browser, { width = 1280, height = 900, dark = false } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: dark ? "dark" : "light", reducedMotion: "reduce" });
  const page = await context.newPage();
  const problems = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) problems.push(`${message.type()}: ${message.text()}`);
  });
  page.on("pageerror", (error) => problems.push(`exception: ${error.message}`));
  page.on("dialog", (dialog) => {
    problems.push(`dialog: ${dialog.message()}`);
    void dialog.dismiss();
  });
  await page.addInitScript(() => {
    window.violations = [];
    document.addEventListener("securitypolicyviolation", (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
  });
  return {
    page,
    problems,
    violations: () => page.evaluate(() => window.violations),
    close: () => context.close(),
  };
}

/** Serious and critical findings of axe-core, in words. */
export async function axe(page) {
  await page.evaluate(readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8"));
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return found.violations.filter((entry) => ["serious", "critical"].includes(entry.impact)).map((entry) => `${entry.id}: ${entry.nodes.map((node) => node.html.slice(0, 120)).slice(0, 3).join(" | ")}`);
}

/** Pixels by which the document is wider than the window. */
export function overflow(page) {
  return page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
}

/** Ask again until it holds; a page shows an answer a moment after it was asked for. */
export async function until(holds, what, seconds = 15) {
  const end = Date.now() + seconds * 1000;
  while (!(await holds())) {
    if (Date.now() > end) throw new Error(`${typeof what === "function" ? await what() : what}, still after ${seconds} s`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** Wait until an element's text matches. */
export function shows(locator, pattern) {
  return until(
    async () => pattern.test(await locator.innerText()),
    async () => `${pattern} is not in "${await locator.innerText()}"`,
  );
}
