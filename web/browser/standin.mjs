// A stand-in for the server of the pages: hostile texts and sizes that a real run on two cores does not reach.
// It serves the built pages with the same Content-Security-Policy.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const PAGES = fileURLToPath(new URL("../../src/insitu/view/pages/", import.meta.url));
const TYPES = { html: "text/html; charset=utf-8", js: "text/javascript", css: "text/css", svg: "image/svg+xml" };
export const CSP =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const MARKS = [
  "<script>window.hit=1</script>",
  "<img src=x onerror=window.hit=1>",
  "<svg onload=window.hit=1>",
  "\"><script>window.hit=1</script>",
  "'><img src=x onerror=window.hit=1>",
  "javascript:window.hit=1",
  "</textarea><script>window.hit=1</script>",
  "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
  "<style>*{display:none}</style>",
  "<a href=javascript:window.hit=1>x</a>",
  "<body onload=window.hit=1>",
  "<math><mtext></mtext><mglyph><svg><mtext><textarea><path id='</textarea><img onerror=window.hit=1 src=1>'>",
  "${window.hit=1}",
  "{{constructor.constructor('window.hit=1')()}}",
  "<details open ontoggle=window.hit=1>",
  "<input autofocus onfocus=window.hit=1>",
  "<object data=javascript:window.hit=1>",
  "<base href=//example.org/>",
  "<meta http-equiv=refresh content='0;url=javascript:window.hit=1'>",
  "\u202egnp.exe<script>window.hit=1</script>",
];
/** A hundred texts that try to become markup. */
export const PAYLOADS = Array.from({ length: 100 }, (_, index) => `${MARKS[index % MARKS.length]}${index}`);

export const SECRET = "the server's own page";
/** The step that the stand-in has not kept. */
export const NOT_KEPT = 2;

const payload = (index) => PAYLOADS[((index % 100) + 100) % 100];

export function rolloutRow(index, hostile) {
  const text = hostile ? payload : (at) => `question ${at}`;
  return {
    rollout_id: hostile ? payload(index) : `run.e0.${index}`,
    store: "epoch-0000",
    epoch: 0,
    step_of_epoch: 0,
    example_id: text(index + 1),
    index,
    generation: index % 8,
    question: text(index + 2),
    answer: text(index + 3),
    reward: (index % 11) / 10,
    advantage: (index % 5) - 2,
    ending: hostile ? payload(index + 4) : "finished",
    failure: hostile ? payload(index + 5) : "",
    fate: "trained",
    reason: hostile ? payload(index + 6) : null,
    num_calls: 1,
    num_output_tokens: 2000,
    policy_steps: [3],
    seconds: 1.5,
    started_at: 1.7e9,
  };
}

function verdict(hostile) {
  return { code: "learning", causes: [], sentence: hostile ? payload(7) : "The reward rises.", needs_change: false };
}

function summary(hostile, rollouts) {
  return {
    key: "r",
    run_id: "run_1",
    name: hostile ? payload(8) : "stand-in",
    path: hostile ? payload(9) : "/run",
    base_model: hostile ? payload(10) : "base",
    method: hostile ? payload(11) : "grpo",
    state: "running",
    outcome: null,
    failure: "",
    started_at: 1.7e9,
    updated_at: 1.7e9,
    num_epochs: 1,
    num_steps: 2000,
    step: 2000,
    num_rollouts: rollouts,
    reward: 0.5,
    validation: 0.4,
    verdict: verdict(hostile),
    problems: hostile ? [payload(12)] : [],
  };
}

function point(position, hostile) {
  const mean = 1 - Math.exp(-position / 600);
  return {
    position,
    number: position + 1,
    epoch: 0,
    step_of_epoch: position,
    step: position + 1,
    store: "epoch-0000",
    at: 1.7e9 + position,
    reward: { mean, std: 0.2, min: 0, p10: 0, p50: mean, p90: 1, max: 1, count: 64 },
    reward_selected: mean,
    fates: hostile ? { trained: 40, [payload(13)]: 24 } : { trained: 40, zero_variance: 20, truncated: 4 },
    endings: {},
    num_rollouts: 64,
    num_groups: 8,
    num_truncated: 4,
    lengths: { mean: 2000, std: 10, min: 1, p10: 1, p50: 2000, p90: 2000, max: 2000, count: 64 },
    calls: {},
    entropy: 1 / (position + 1),
    kl: null,
    mismatch: 1e-5,
    loss: 0.1,
    grad_norm: 1,
    learning_rate: 1e-5,
    seconds: hostile ? { [payload(14)]: 3, rollouts: 4 } : { rollouts: 10, train: 3, publish: 1 },
    tokens_per_second: 900,
    metrics: {},
    verdict: null,
  };
}

function runView(hostile, rollouts, steps) {
  const alarm = { rule: payload(15), active: true, first_step: 1, last_step: 2, sentence: payload(16), setting: payload(17), source: payload(18) };
  return {
    run: summary(hostile, rollouts),
    points: Array.from({ length: steps }, (_, index) => point(index, hostile)),
    validations: [0, steps / 2, steps].map((position) => ({
      epoch: 0, step: position, store: "validation-0000", at: 1.7e9, reward: 0.2 + position / steps / 2, low: 0.1, high: 0.9,
      standard_error: 0.1, num_examples: 20, num_samples: 20, num_failed: 0, remeasured: false,
      gain: position ? { difference: 0.3, low: 0.1, high: 0.5, confidence: 0.95, num_examples: 20, num_unpaired: 0, verdict: "better", sentence: hostile ? payload(21) : "Better." } : null,
    })),
    best_step: steps,
    alarms: hostile ? [alarm] : [],
    reasons: hostile ? ["trained", payload(13)] : ["trained", "zero_variance", "truncated"],
    phases: hostile ? [payload(14), "rollouts"] : ["rollouts", "train", "publish"],
    stores: ["validation-0000", "epoch-0000", hostile ? payload(22) : "validation-0001"].map((name, index) => ({
      name, label: name, kind: index === 1 ? "training" : "validation", epoch: 0, step_of_epoch: 0, position: 0, policy_step: 3, num_rollouts: 64, num_groups: 8,
    })),
    texts: { available: true, source: hostile ? payload(23) : "" },
    cursor: "1",
    rescoring: SECRET,
    configured: true,
  };
}

function columnOf(length, hostile, sampled) {
  return {
    ids: Array.from({ length }, (_, index) => index),
    texts: Array.from({ length }, (_, index) => (hostile ? payload(index) : index % 40 === 39 ? " line.\n" : ` w${index}`)),
    logprobs: sampled ? Array.from({ length }, (_, index) => -((index * 7) % 50) / 10) : null,
  };
}

function rolloutView(hostile, numTokens) {
  const row = rolloutRow(3, hostile);
  const call = (index) => ({
    id: `c${index}`, model: hostile ? payload(24) : "m", function: hostile ? payload(25) : null, policy_step: 3 + index, policy_version: hostile ? payload(26) : "adder@3",
    finish_reason: hostile ? payload(27) : "stop", constrained: false, parent_id: null, shared_tokens: 0, shared_messages: 0, fate: "trained", reason: null, advantage: 0.7, call_reward: null,
    messages: [{ role: hostile ? payload(28) : "user", name: hostile ? payload(29) : "", content: hostile ? PAYLOADS.join("\n") : "hello" }],
    answer: { role: "assistant", content: hostile ? payload(30) : "4", reasoning_content: hostile ? payload(31) : "", tool_calls: [{ function: { name: hostile ? payload(32) : "add", arguments: hostile ? payload(33) : "{}" } }] },
    tools: [{ name: hostile ? payload(34) : "add" }], sampling: {}, timings: {}, started_at: null, num_prompt_tokens: 100, num_output_tokens: numTokens,
    prompt: columnOf(100, hostile, false), output: columnOf(numTokens, hostile, true),
  });
  return {
    row,
    input: hostile ? { [payload(35)]: payload(36) } : "what?",
    expected: hostile ? payload(37) : "4",
    output: hostile ? payload(38) : "4",
    reasoning: hostile ? payload(39) : null,
    reward_parts: { [hostile ? payload(40) : "exact"]: 1, length: -0.2 },
    calls: [call(0), call(1)],
    num_calls_left_out: 0,
    capture: null,
    traceback: hostile ? { text: payload(41), error: payload(42), frames: [payload(43)] } : null,
    siblings: [0, 1].map((index) => ({ rollout_id: hostile ? payload(index) : `run.e0.${index}`, generation: index, reward: index, advantage: index, ending: hostile ? payload(44) : "finished", fate: "trained", reason: null })),
    basis: hostile ? payload(45) : "trainer_function",
    tokens_problem: "",
  };
}

function groupView(hostile, length) {
  const span = (size, more) => ({ length: size, kind: "sampled", num_sampled: 1, num_trained: 1, advantage_sum: 0.4, reasons: hostile ? [payload(46)] : [], policy_steps: [3], logprobs: Array(size).fill(-1), ...more });
  const node = (id, size, children, depth, branches, spans) => ({ id, parent: id ? 0 : null, children, depth, ...columnOf(size, hostile, false), spans: spans ?? [span(size)], branches });
  const siblings = Array.from({ length: 16 }, (_, index) => rolloutRow(index, hostile));
  return {
    store: "epoch-0000", index: 3, example_id: hostile ? payload(47) : "3+7", input: hostile ? payload(48) : "what?", expected: hostile ? payload(49) : "10", reward: 0.4, reward_std: 0.3,
    tree: {
      siblings,
      advantages: siblings.map(() => [0.1]),
      nodes: [node(0, 50, siblings.map((_, index) => index + 1), 0, siblings.map((_, index) => index), [span(45, { kind: "context", num_trained: 0, advantage_sum: null, logprobs: null }), span(5)]), ...siblings.map((_, index) => node(index + 1, length, [], 50, [index], [span(length, { advantage_sum: index % 2 ? 1 : -1 })]))],
      branches: siblings.map((_, index) => ({ sibling: index, sequence: 0, node: index + 1, num_tokens: 50 + length, call_ids: [] })),
      num_prompt_tokens: 45,
      prompt: [{ role: "user", content: hostile ? payload(50) : "What is 3 + 7?" }],
      basis: "trainer_function",
      without_tokens: [],
    },
    steps: Array.from({ length: 30 }, (_, index) => ({ store: "epoch-0000", epoch: index, step_of_epoch: 0, index: index === 4 ? 3 : index + 90, policy_step: index, num_rollouts: 8, reward: index / 30, reward_min: 0, reward_max: 1, num_trained: 8 })),
    num_left_out: 0,
  };
}

function resampled(hostile, asked) {
  const branch = (index) => ({ call_id: `c${index}`, ...columnOf(6, hostile, true), finish_reason: hostile ? payload(52) : "stop", text: "", reward: index === 1 ? null : index / 10, error: index === 1 ? (hostile ? payload(53) : "KeyError: 'x'") : null });
  return {
    rollout_id: asked.get("rollout"), sequence: Number(asked.get("sequence")), depth: Number(asked.get("depth")), step: asked.has("step") ? Number(asked.get("step")) : null,
    model: hostile ? payload(54) : "adder@3", version: hostile ? payload(55) : "adder@3", branches: Array.from({ length: Number(asked.get("count")) }, (_, index) => branch(index)),
    score_gap: 0.0004, note: hostile ? payload(56) : "", reward_note: hostile ? payload(57) : "",
  };
}

function compareView(hostile) {
  const side = (store) => ({ run: "r", store, policy_step: 3, reward: 0.5, standard_error: 0.1, num_rollouts: 20, num_failed: 1 });
  return {
    before: side("validation-0000"), after: side(hostile ? payload(22) : "validation-0001"),
    gain: { difference: 0.3, low: 0.1, high: 0.5, confidence: 0.95, num_examples: 20, num_unpaired: 1, verdict: "better", sentence: hostile ? payload(51) : "Better." },
    examples: Array.from({ length: 20 }, (_, index) => ({ example_id: hostile ? payload(index + 52) : `e${index}`, question: hostile ? payload(index + 60) : `q${index}`, before: 0.1, after: 0.5, difference: 0.4, index_before: 1, index_after: 1, rollout_before: "a", rollout_after: "b" })),
    next: null, total: 20, configuration: hostile ? [payload(80)] : [],
  };
}

/** Serve; returns the address, a way to send events and to stop. */
export async function standin({ hostile = false, rollouts = 100_000, tokens = 2000, steps = 200 } = {}) {
  const streams = new Set();
  const asked = [];
  const server = createServer((request, response) => {
    const url = new URL(request.url, "http://x");
    asked.push(request.url);
    const json = (body, status = 200) => {
      response.writeHead(status, { "content-type": "application/json" });
      response.end(JSON.stringify(body));
    };
    const [, view, , , run, section, one, , action] = url.pathname.split("/");
    if (view !== "view") {
      const name = url.pathname === "/" ? "index.html" : url.pathname.slice(1);
      try {
        const body = readFileSync(join(PAGES, name.replaceAll("..", "")));
        response.writeHead(200, { "content-type": TYPES[name.split(".").pop()] ?? "text/plain", "content-security-policy": CSP, "x-content-type-options": "nosniff" });
        response.end(body);
      } catch {
        json({ error: { message: "no such file" } }, 404);
      }
    } else if (run === undefined) json({ runs: [summary(hostile, rollouts)], root: hostile ? payload(90) : "/runs", problems: hostile ? [payload(91)] : [] });
    else if (run !== "r") json({ error: { type: "not_found", message: `no run ${decodeURIComponent(run)}`, hint: hostile ? payload(92) : "insitu view DIR" } }, 404);
    else if (section === undefined) json(runView(hostile, rollouts, steps));
    else if (section === "config") json({ config: { [hostile ? payload(93) : "a"]: hostile ? payload(94) : 1 }, fingerprint: "" });
    else if (section === "alarms") json({ alarms: runView(hostile, 1, 2).alarms, failures: hostile ? [payload(95)] : [] });
    else if (section === "rollouts" && one !== undefined) json(rolloutView(hostile, tokens));
    else if (section === "rollouts") {
      const from = Number(url.searchParams.get("cursor") ?? "0");
      const limit = Number(url.searchParams.get("limit") ?? "50");
      const end = Math.min(rollouts, from + limit);
      json({ rollouts: Array.from({ length: end - from }, (_, index) => rolloutRow(from + index, hostile)), next: end < rollouts ? String(end) : null, total: rollouts, endings: { [hostile ? payload(96) : "finished"]: rollouts }, reasons: { trained: 1, [hostile ? payload(97) : "zero_variance"]: 2 } });
    } else if (action === "resample") {
      if (request.method !== "POST" || request.headers["x-insitu-own-page"] !== SECRET) json({ error: { message: "not by this page" } }, 403);
      else if (url.searchParams.get("step") === String(NOT_KEPT)) json({ error: { type: "NotFound", message: hostile ? payload(58) : `step ${NOT_KEPT} of run 'adder' is not kept; kept are 0, 3`, hint: hostile ? payload(59) : "pin a step to keep it" } }, 404);
      else json(resampled(hostile, url.searchParams));
    } else if (section === "groups" && one !== undefined) json(groupView(hostile, tokens));
    else if (section === "groups") json({ groups: [{ store: "epoch-0000", epoch: 0, step_of_epoch: 0, index: 3, example_id: hostile ? payload(98) : "e", question: hostile ? payload(99) : "q", num_rollouts: 8, reward: 0.4, reward_min: 0, reward_max: 1, num_trained: 8 }], next: null, total: 1 });
    else if (section === "compare") json(compareView(hostile));
    else if (section === "events") {
      response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
      response.write(": hello\n\n");
      streams.add(response);
      response.on("close", () => streams.delete(response));
    } else json({ error: { message: "no such page" } }, 404);
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  const { port } = server.address();
  return {
    address: `http://127.0.0.1:${port}/`,
    asked,
    streams,
    send: (id, kind, data) => {
      for (const stream of streams) stream.write(`id: ${id}\nevent: ${kind}\ndata: ${JSON.stringify({ kind, num_rollouts: 0, point: null, text: "", ...data })}\n\n`);
    },
    cut: () => {
      for (const stream of streams) stream.destroy();
    },
    stop: () =>
      new Promise((done) => {
        server.close(done);
        server.closeAllConnections();
      }),
  };
}
