// The answers under /view/v1, as src/insitu/wire/views defines them. Any text may be hostile: text nodes only.

export type Json = string | number | boolean | null | readonly Json[] | { readonly [key: string]: Json };
export type JsonObject = { readonly [key: string]: Json };
type Counts = Readonly<Record<string, number>>;

export interface Verdict {
  code: string;
  causes: string[];
  sentence: string;
  needs_change: boolean;
}

export interface RunSummary {
  key: string;
  run_id: string;
  name: string;
  path: string;
  base_model: string;
  method: string;
  state: "running" | "ended" | "stopped";
  outcome: string | null;
  failure: string;
  started_at: number | null;
  updated_at: number | null;
  num_epochs: number;
  num_steps: number;
  step: number;
  num_rollouts: number;
  /** Share of the rollouts that the server has read so far. */
  indexed?: number;
  reward: number | null;
  validation: number | null;
  verdict: Verdict | null;
  problems: string[];
}

export interface RunList {
  runs: RunSummary[];
  root: string;
  problems: string[];
}

export interface Spread {
  mean: number;
  std: number;
  min: number;
  p10: number | null;
  p50: number | null;
  p90: number | null;
  max: number;
  count: number;
}

export interface StepPoint {
  position: number;
  /** The update that it made, or was to make. */
  number: number;
  epoch: number;
  step_of_epoch: number;
  step: number | null;
  store: string;
  at: number | null;
  reward: Spread | null;
  reward_selected: number | null;
  fates: Counts;
  endings: Counts;
  num_rollouts: number;
  num_groups: number;
  num_truncated: number | null;
  lengths: Spread | null;
  calls: Counts;
  entropy: number | null;
  kl: number | null;
  mismatch: number | null;
  loss: number | null;
  grad_norm: number | null;
  learning_rate: number | null;
  seconds: Counts;
  tokens_per_second: number | null;
  verdict: Verdict | null;
}

export interface Gain {
  difference: number;
  low: number | null;
  high: number | null;
  confidence: number;
  num_examples: number;
  num_unpaired: number;
  verdict: string;
  sentence: string;
}

export interface ValidationPoint {
  epoch: number;
  step: number;
  store: string | null;
  reward: number | null;
  low: number | null;
  high: number | null;
  num_examples: number;
  num_samples: number;
  num_failed: number;
  remeasured: boolean;
  gain: Gain | null;
}

export interface Alarm {
  rule: string;
  active: boolean;
  first_step: number;
  last_step: number;
  sentence: string;
  setting: string;
  source: string;
}

export interface AlarmList {
  alarms: Alarm[];
  failures: string[];
}

export interface Store {
  name: string;
  /** The name as people say it. */
  label: string;
  kind: "training" | "validation" | "remeasured" | "set_aside";
  epoch: number | null;
  step_of_epoch: number | null;
  position: number | null;
  policy_step: number | null;
  num_rollouts: number;
  num_groups: number;
}

export interface RunView {
  run: RunSummary;
  points: StepPoint[];
  validations: ValidationPoint[];
  best_step: number | null;
  alarms: Alarm[];
  reasons: string[];
  phases: string[];
  stores: Store[];
  texts: { available: boolean; source: string };
  cursor: string;
  /** The secret with which a page may ask for a new score or a fork; null where no page may. */
  rescoring?: string | null;
  /** Whether the user named a configuration, whose reward and backend serve both. */
  configured?: boolean;
}

export interface ConfigView {
  config: JsonObject;
  fingerprint: string;
}

export interface RunEvent {
  kind: string;
  num_rollouts: number;
  point: StepPoint | null;
  text: string;
}

export interface RolloutRow {
  rollout_id: string;
  store: string;
  epoch: number | null;
  step_of_epoch: number | null;
  example_id: string;
  index: number;
  generation: number;
  question: string;
  answer: string;
  reward: number | null;
  advantage: number | null;
  ending: string;
  failure: string;
  fate: string;
  reason: string | null;
  num_calls: number;
  num_output_tokens: number;
  policy_steps: number[];
  seconds: number | null;
  started_at: number | null;
}

export interface RolloutPage {
  rollouts: RolloutRow[];
  next: string | null;
  total: number;
  endings: Counts;
  reasons: Counts;
}

export interface TokenColumn {
  ids: number[];
  texts: string[] | null;
  logprobs: number[] | null;
  /** Absent until the trainer keeps them. */
  trainer_logprobs?: number[] | null;
}

export interface CallView {
  id: string;
  model: string;
  function: string | null;
  policy_step: number;
  policy_version: string;
  finish_reason: string;
  constrained: boolean;
  parent_id: string | null;
  shared_tokens: number;
  shared_messages: number;
  fate: string;
  reason: string | null;
  advantage: number | null;
  call_reward: number | null;
  messages: JsonObject[];
  answer: JsonObject | null;
  tools: JsonObject[] | null;
  num_prompt_tokens: number;
  num_output_tokens: number;
  prompt: TokenColumn | null;
  output: TokenColumn | null;
}

export interface Sibling {
  rollout_id: string;
  generation: number;
  reward: number | null;
  advantage: number | null;
  ending: string;
  fate: string;
  reason: string | null;
}

export interface RolloutView {
  row: RolloutRow;
  input: Json;
  expected: Json;
  output: Json;
  reasoning: Json;
  reward_parts: Counts;
  calls: CallView[];
  num_calls_left_out: number;
  capture: JsonObject | null;
  traceback: { text: string; error: string; frames: string[] } | null;
  siblings: Sibling[];
  basis: string;
  tokens_problem: string;
}

export interface TreeSpan {
  length: number;
  kind: "context" | "sampled";
  num_sampled: number;
  num_trained: number;
  advantage_sum: number | null;
  reasons: string[];
  policy_steps: number[];
  logprobs: number[] | null;
  /** Absent until the trainer keeps them. */
  trainer_logprobs?: number[] | null;
}

export interface TreeNode {
  id: number;
  parent: number | null;
  children: number[];
  depth: number;
  ids: number[];
  texts: string[] | null;
  spans: TreeSpan[];
  branches: number[];
}

export interface TreeBranch {
  sibling: number;
  sequence: number;
  node: number;
  num_tokens: number;
  call_ids: string[];
}

export interface TreeView {
  siblings: RolloutRow[];
  advantages: (number[] | null)[];
  nodes: TreeNode[];
  branches: TreeBranch[];
  num_prompt_tokens: number;
  prompt: JsonObject[];
  basis: string;
  without_tokens: string[];
}

export interface GroupAtStep {
  store: string;
  epoch: number | null;
  step_of_epoch: number | null;
  index: number;
  policy_step: number | null;
  num_rollouts: number;
  reward: number | null;
  reward_min: number | null;
  reward_max: number | null;
  num_trained: number;
}

export interface GroupView {
  store: string;
  index: number;
  example_id: string;
  input: Json;
  expected: Json;
  reward: number | null;
  reward_std: number | null;
  tree: TreeView;
  steps: GroupAtStep[];
  num_left_out: number;
}

export interface RescoredSibling {
  rollout_id: string;
  generation: number;
  reward: number | null;
  new_reward: number | null;
  advantage: number | null;
  new_advantage: number | null;
  new_advantages: number[] | null;
  fate: string;
  reason: string | null;
  error: string | null;
  frames: string[];
}

export interface RescoredGroup {
  store: string;
  index: number;
  reward_function: string;
  siblings: RescoredSibling[];
  basis: string;
  note: string;
}

/** A continuation that was sampled just now: not trained on, without an advantage. */
export interface ResampledBranch {
  call_id: string;
  ids: number[];
  texts: string[] | null;
  logprobs: number[];
  finish_reason: string;
  text: string;
  reward: number | null;
  error: string | null;
}

export interface ResampledFork {
  rollout_id: string;
  sequence: number;
  depth: number;
  /** null: the base model. */
  step: number | null;
  model: string;
  version: string;
  branches: ResampledBranch[];
  score_gap: number | null;
  note: string;
  reward_note: string;
}

export interface GroupRow {
  store: string;
  epoch: number | null;
  step_of_epoch: number | null;
  index: number;
  example_id: string;
  question: string;
  num_rollouts: number;
  reward: number | null;
  reward_min: number | null;
  reward_max: number | null;
  num_trained: number;
}

export interface GroupPage {
  groups: GroupRow[];
  next: string | null;
  total: number;
}

export interface ComparedSide {
  run: string;
  store: string;
  label: string;
  policy_step: number | null;
  reward: number | null;
  standard_error: number | null;
  num_rollouts: number;
  num_failed: number;
}

export interface ComparedExample {
  example_id: string;
  question: string;
  before: number | null;
  after: number | null;
  difference: number | null;
  index_before: number | null;
  index_after: number | null;
  rollout_before: string | null;
  rollout_after: string | null;
}

export interface CompareView {
  before: ComparedSide;
  after: ComparedSide;
  gain: Gain | null;
  examples: ComparedExample[];
  next: string | null;
  total: number;
  configuration: string[];
}

// Answers of a backend's API: src/insitu/wire/views/backend.py, and of its other routes src/insitu/wire/answers.py.

export interface Session {
  key: string;
  scopes: string[];
  project: string | null;
}

export interface BackendRun {
  name: string;
  base_model: string;
  state: string;
  step: number;
  error: string | null;
  promoted: number | null;
  updated_at: number;
}

export interface FleetView {
  causes: string[];
  state: string | null;
  report_age_seconds: number | null;
  waiting: string | null;
  model: string | null;
  processes: { name: string; pid: number | null }[];
  replicas: {
    id: string;
    pid: number | null;
    joined: boolean;
    healthy: boolean | null;
    in_flight: number | null;
    versions: string[];
  num_versions: number;
  }[];
  ranks: { rank: number; pid: number | null; device: string; dtype: string; num_threads: number | null }[];
  gateway: { held: number; in_flight: number; recorded: number; record_backlog: number; versions: Counts } | null;
  phases: { run: string; job_id: string; phase: string; progress: number; attempt: number; started_at: number | null }[];
  jobs: Counts;
  disk_free_bytes: number;
  disk_size_bytes: number;
}

export interface Checkpoint {
  run: string;
  step: number;
  created_at: number;
  pinned: boolean;
  /** Calls get it, or would after a rollback. */
  promoted: boolean;
}

export interface Promotion {
  id: number;
  step: number | null;
  back_to: number | null;
  /** Why it is not served yet; empty once it is. */
  reason: string;
}

export interface Step {
  step: number;
  job_id: string;
  metrics: JsonObject;
}
