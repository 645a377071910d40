import { describe, expect, it } from "vitest";

import { diverging, fullScale, level, LEVELS, shade } from "../src/colour";
import { ago, figure, oneLine, percent, plural, seconds, sentence, signed, visibleToken } from "../src/format";
import { bins, chunks, joined, rowsInSight, wantsMore } from "../src/paging";
import { changed, href, parseHash } from "../src/route";
import { axis, lines, niceStep, wholeTicks } from "../src/scale";

describe("format", () => {
  it("writes figures for people", () => {
    expect([0, 0.1408, 10.84, 6e-6, -0.5, 12345.6, null, NaN].map((v) => figure(v))).toEqual(["0", "0.141", "10.8", "6.0e−6", "−0.5", "12,346", "–", "–"]);
    expect([0.614, -0.614, 0, 1e-5, null].map((v) => signed(v))).toEqual(["+0.61", "−0.61", "0", "+1e−5", "–"]);
    expect([0, 0.004, 0.935, null].map((v) => percent(v))).toEqual(["0 %", "< 1 %", "94 %", "–"]);
    expect([1.26, 61, 150, 9000].map((v) => seconds(v))).toEqual(["1.3 s", "61 s", "2 min 30 s", "2 h 30 min"]);
    expect(plural(1, "rollout") + plural(2000, "rollout")).toBe("1 rollout2,000 rollouts");
    expect(ago(100, 160)).toBe("60 s ago");
    expect(ago(170, 160)).toBe("just now");
  });
  it("makes sentences", () => {
    expect([sentence(""), sentence("no call"), sentence("Done.")]).toEqual(["", "No call.", "Done."]);
  });
  it("shortens by characters, not by halves of them", () => {
    expect(oneLine("a\n  b")).toBe("a b");
    expect(oneLine("😀😀😀😀", 3)).toBe("😀😀…");
  });
  it("makes what a token hides visible", () => {
    expect(visibleToken(" a\n\t\u0000")).toBe("·a⏎⇥␀");
    expect(visibleToken("x\u202ey\u200b")).toBe("x[202e]y[200b]");
    expect(visibleToken("")).toBe("∅");
    expect(visibleToken("<script>")).toBe("<script>");
  });
});

describe("colour", () => {
  it("is symmetric and full at the scale's end", () => {
    expect(diverging(2, 2)).toBe(`pos k${LEVELS}`);
    expect(diverging(-2, 2)).toBe(`neg k${LEVELS}`);
    expect(diverging(0, 2)).toBe("nul");
    expect(level(5, 2)).toBe(LEVELS);
    expect(level(NaN, 2)).toBe(0);
  });
  it("has a scale even where nothing happens", () => {
    expect(fullScale([null, undefined, 0])).toBe(1);
    expect(fullScale([0.5, -3, null])).toBe(3);
  });
  it("says when the figure is not there", () => {
    const scales = { advantage: 1, logprob: 5, difference: 1 };
    const token = { advantage: null, logprob: -1, trainer: null, use: "trained", version: null };
    expect(shade("difference", token, scales).known).toBe(false);
    expect(shade("advantage", token, scales).known).toBe(false);
    expect(shade("logprob", token, scales).known).toBe(true);
    expect(shade("advantage", { ...token, use: "context" }, scales).classes).toBe("ctx");
    expect(shade("difference", { ...token, trainer: -1.5 }, scales).classes).toContain("pos");
  });
});

describe("paging", () => {
  it("draws what is in sight and no more", () => {
    expect(rowsInSight(0, 400, 40, 100_000)).toEqual({ first: 0, end: 18 });
    expect(rowsInSight(4000, 400, 40, 100_000)).toEqual({ first: 92, end: 118 });
    expect(rowsInSight(4000, 400, 40, 3)).toEqual({ first: 3, end: 3 });
    expect(rowsInSight(0, 400, 40, 0)).toEqual({ first: 0, end: 0 });
  });
  it("asks for the next page in time, and never past the last", () => {
    expect(wantsMore({ first: 0, end: 20 }, 100, true)).toBe(false);
    expect(wantsMore({ first: 50, end: 70 }, 100, true)).toBe(true);
    expect(wantsMore({ first: 50, end: 100 }, 100, false)).toBe(false);
  });
  it("adds a page once", () => {
    expect(joined(["a"], ["a", "b"], (row) => row)).toEqual(["a", "b"]);
  });
  it("covers everything with bins", () => {
    expect(bins(7, 3)).toEqual([{ first: 0, end: 3 }, { first: 3, end: 6 }, { first: 6, end: 7 }]);
    expect(bins(2, 100)).toHaveLength(2);
    expect(chunks(0, 5)).toEqual([]);
  });
});

describe("route", () => {
  it("survives names of any kind", () => {
    for (const name of ["a/b", "<script>", "50%", "ä ö", "..", "a?b=c#d", "__proto__"]) {
      const route = parseHash(href(["runs", name], { q: name, [name]: "1" }));
      expect(route.parts).toEqual(["runs", name]);
      expect(route.query["q"]).toBe(name);
      expect(Object.keys(route.query).sort()).toEqual([name, "q"].sort());
    }
    expect(parseHash("#/runs/50%").parts).toEqual(["runs", "50%"]);
  });
  it("changes a filter and removes one", () => {
    const route = parseHash("#/runs/a/rollouts?ending=failed&step=3");
    expect(changed(route, { step: "4" })).toBe("#/runs/a/rollouts?ending=failed&step=4");
    expect(changed(route, { step: "" })).toBe("#/runs/a/rollouts?ending=failed");
  });
});

describe("scale", () => {
  it("has round ticks around the values", () => {
    expect(axis([0.04, 0.96]).ticks).toEqual([0, 0.25, 0.5, 0.75, 1]);
    expect(axis([]).ticks).toEqual([0, 1]);
    expect(axis([3, 3]).low).toBeLessThan(3);
    expect(niceStep(0.3)).toBe(0.5);
    expect(wholeTicks(1, 25, 6)).toEqual([5, 10, 15, 20, 25]);
    expect(wholeTicks(3, 3, 6)).toEqual([3]);
  });
  it("breaks the line at a gap", () => {
    expect(lines([0, 1, 2], [1, null, 3])).toEqual(["0.0,1.0", "2.0,3.0"]);
  });
});
