// The state of the list of runs, and the reads that keep it up to date.

import { get } from "./api.js";
import { isShown } from "./finding_parts.js";
import { now } from "./times.js";

const PAGE_LIMIT = 500;
const DAY_MS = 86_400_000;
const MAX_RUNS = 5000;
const RECENT_NS = 300e9; // Runs seen in this time before the newest batch are read again: their state may change.
const WHOLE_EVERY = 20; // Refreshes until all runs are read again: some may have been deleted.
const DIAGNOSE_MS = 15_000; // Least time between two requests for the diagnosis of one run.

export const PAGE_ROWS = 30;
export const state = {
  runs: new Map(), // By name.
  matches: 0, // Runs that match the words and the start, also those that are not read.
  total: 0, // Runs of the workspace.
  selected: new Map(), // The marked runs by name, also those that no longer match.
  shown: PAGE_ROWS, // Rows of the page.
  order: { key: "started", down: true },
};
const whole = { key: null, reads: 0 }; // The words and the start for which all runs are read; null if not all are.
const diagnosing = { queue: [], isBusy: false, asked_ms: new Map() };

// Whether all runs that match the words and the start are read.
export function hasAll(wanted) {
  return whole.key === keyOf(wanted);
}

// Read the newest runs that match the words and the start: those that are shown, or all.
export async function readRuns(wanted, isAll) {
  const reads = hasAll(wanted) ? whole.reads + 1 : 0; // Since the latest read of all runs.
  const isUpdate = isAll && reads % WHOLE_EVERY > 0;
  const runs = new Map(isUpdate ? state.runs : []);
  const { found, matches, total } = await readPages(queryOf(wanted, runs), isAll ? MAX_RUNS : state.shown);
  for (const run of found) {
    const known = state.runs.get(run.run)?.diagnosis;
    if (run.diagnosis === null && known) run.diagnosis = { ...known, current: false };
    runs.set(run.run, run);
  }
  Object.assign(state, { runs, total, ...(!isUpdate && { matches }) });
  Object.assign(whole, { key: isAll ? keyOf(wanted) : null, reads });
}

const keyOf = ({ text, days }) => `${days} ${text}`;

// The query for the runs that may differ from the known ones.
function queryOf({ text, days }, known) {
  const newest_ns = Math.max(0, ...[...known.values()].map((run) => run.last_seen_ns));
  return new URLSearchParams({
    ...(text && { search: text }),
    ...(days && { created_after_ns: Math.max(0, now() - days * DAY_MS) * 1e6 }),
    ...(known.size && { seen_after_ns: Math.max(0, newest_ns - RECENT_NS) }),
  });
}

async function readPages(query, most) {
  const found = [];
  for (;;) {
    query.set("limit", Math.min(PAGE_LIMIT, most - found.length));
    const { runs, next, ...counts } = await get(`/runs?${query}`);
    found.push(...runs);
    if (next === null || found.length >= most) return { found, ...counts };
    query.set("cursor", next);
  }
}

// Request the missing diagnoses one after the other; `show` shows a run with its new one.
export async function diagnose(wanted, show) {
  const time_ms = Date.now();
  const isDue = ({ run }) => !(time_ms - diagnosing.asked_ms.get(run) < DIAGNOSE_MS);
  diagnosing.queue = wanted.filter((run) => !run.diagnosis?.current && isDue(run));
  if (diagnosing.isBusy) return; // The loop goes on with the new queue.
  diagnosing.isBusy = true;
  while (diagnosing.queue.length) {
    const { run } = diagnosing.queue.shift();
    diagnosing.asked_ms.set(run, Date.now());
    const diagnosis = await readDiagnosis(run);
    const known = state.runs.get(run);
    if (!diagnosis || !known) continue;
    known.diagnosis = diagnosis;
    show(known);
  }
  diagnosing.isBusy = false;
}

// As the field `diagnosis` of `/runs`; null if there is none now.
async function readDiagnosis(run) {
  const response = await get(`/runs/${encodeURIComponent(run)}/diagnostics`).catch(() => null);
  if (!response) return null;
  const { summary, missing, goodput } = response;
  const findings = response.findings.filter(isShown);
  const { verdict: worst = null, severity = null, code = null, gain = null } = findings[0] ?? {};
  const counts = { findings: findings.length, missing: missing.length };
  return { summary, worst, severity, code, gain, goodput, ...counts, current: true };
}
