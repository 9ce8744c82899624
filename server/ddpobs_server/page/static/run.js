// The page of one run: its findings, then its step times, ranks and buckets.

import { ago, element, get, ms, notice, refresh, root, runOnce, saveWithToken } from "./api.js";
import { heat, PHASES, phases, timeline, wholeRun } from "./charts.js";

const SHOWN_ATTEMPTS = 50, SHOWN_STACKS = 4, SHOWN_STEPS = 500, SHOWN_ROWS = 400_000, SHOWN_RANKS = 32, SHOWN_SPANS = 200, NAMED_RANKS = 12, SHOWN_BINS = 400, SHOWN_INTERVALS = 3;
const run = decodeURIComponent(location.pathname.split("/").at(-1));
const base = `/runs/${encodeURIComponent(run)}`;
const attempt = new URLSearchParams(location.search).get("attempt");  // Without it the latest attempt is shown.
const by = (id) => document.getElementById(id);
let ranks = [], last = 0, count = SHOWN_STEPS, straggler = null, slowest = [], layouts = [], chosen = null;

by("title").textContent = run;
document.title = `${run} · ddpobs`;
by("trace").href = `${root}/api/v1${address("trace")}`;
saveWithToken(by("trace"), "trace.json");
by("phase-legend").append(...PHASES.map((phase) => element("span", {}, element("span", { class: `swatch ${phase}` }), phase.replace("_", " "))));

// The path of a read of the shown attempt.
function address(read, query = "") {
  const all = [query, attempt === null ? "" : `attempt=${encodeURIComponent(attempt)}`].filter(Boolean).join("&");
  return `${base}/${read}${all && `?${all}`}`;
}

// The traceback of a crash, or the stacks of the ranks that a hang names.
function stacks({ ranks, evidence }) {
  if (evidence.traceback) return [element("pre", {}, evidence.traceback)];
  const known = ranks.filter((rank) => evidence.stacks?.[rank]?.length).slice(0, SHOWN_STACKS);
  return known.map((rank) => element("pre", {}, [`Rank ${rank}:`, ...evidence.stacks[rank]].join("\n  ")));
}

function findingCard(finding) {
  const evidence = Object.entries(finding.evidence).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, readable(name, value))]);
  const card = element("article", { class: `finding ${finding.severity}` },
    element("span", { class: "badge" }, `${finding.severity} · ${finding.code}`),
    element("h3", {}, finding.title),
    ...times(finding.intervals), element("p", {}, finding.remedy), ...stacks(finding));
  if (finding.gain) card.append(element("p", {}, `The remedy would gain ${ms(finding.gain.step_ns)} per step, ${(100 * finding.gain.ratio).toFixed(0)} % of it (± ${(100 * finding.gain.ratio * finding.gain.error_ratio).toFixed(1)} %).`));
  if (finding.buckets.length) card.append(element("p", { class: "muted" }, `${finding.code === "straggler" ? "Most of it occurs at" : "At"} bucket ${finding.buckets.join(", ")}: ${finding.parameters.slice(0, 6).join(", ")}${finding.parameters.length > 6 ? ", …" : ""}`));
  card.append(element("details", {}, element("summary", {}, `Evidence, steps ${finding.steps[0]} to ${finding.steps[1]}`), element("dl", {}, ...evidence)));
  return card;
}

// When a finding held: the reader's own time of day.
function times(intervals) {
  const known = intervals.filter(({ began_ns }) => began_ns !== null), clock = (ns) => new Date(ns / 1e6).toLocaleString();
  const lines = known.slice(0, SHOWN_INTERVALS).map(({ from, to, began_ns, ended_ns }) => `steps ${from} to ${to}: ${clock(began_ns)} to ${clock(ended_ns)}`);
  if (known.length > SHOWN_INTERVALS) lines.push(`and ${known.length - SHOWN_INTERVALS} more`);
  return lines.length ? [element("p", { class: "muted" }, lines.join("; "))] : [];
}

async function showWhole({ findings }) {
  const { columns } = await get(address("steps", `points=${SHOWN_BINS}&mean=true`));
  wholeRun(by("whole"), columns, findings.filter(({ ranks }) => ranks.length).flatMap(({ intervals }) => intervals));
}

function readable(name, value) {
  if (Array.isArray(value)) return value.map((inner) => readable(name, inner)).join(name === "stacks" ? "\n" : ", ") || "–";
  if (value !== null && typeof value === "object") return Object.entries(value).map(([key, inner]) => `${key}: ${readable(name, inner)}`).join(", ") || "–";
  return name.endsWith("_ns") ? ms(value) : String(value);
}

function showFindings({ findings, missing, steps_seen }) {
  const cards = findings.map(findingCard);
  if (!cards.length) cards.push(element("article", { class: "finding" }, element("h3", {}, steps_seen ? `Nothing found up to step ${steps_seen - 1}.` : "No step to judge yet.")));
  if (missing.length) cards.push(element("p", { class: "muted" }, `Not judged yet: ${missing.join("; ")}`));
  by("findings").replaceChildren(...cards);
}

async function showPhases() {
  const choice = by("rank").value, rank = ranks.find((candidate) => String(candidate.rank) === choice);
  const query = rank ? `${until(rank.last_step)}&rank=${choice}` : `${until(last)}&mean=true`;
  const { columns } = await get(address("steps", query));
  if (by("rank").value !== choice) return;  // The choice has changed meanwhile.
  const current = ranks.filter((candidate) => candidate.steps && candidate.last_step > last - count);
  setText("phases-shown", stepsNote(), rank ? "" : absentNote(current.map((candidate) => candidate.rank)));
  phases(by("phases"), columns.step.map((step, row) => ({
    step, wall: columns.wall_ns?.[row] ?? columns.end_ns[row] - columns.start_ns[row],
    ...Object.fromEntries(PHASES.map((phase) => [phase, columns[`${phase}_ns`][row]])),
  })));
}

function showRanks() {
  const select = by("rank"), choice = select.value || "mean";
  select.replaceChildren(element("option", { value: "mean" }, "mean of all"), ...ranks.map((rank) => element("option", { value: rank.rank }, `rank ${rank.rank}`)));
  select.value = choice;
  by("ranks").tBodies[0].replaceChildren(...ranks.map((rank) => element("tr", {},
    element("td", { class: "n" }, String(rank.rank)), element("td", {}, rank.host || "–"), element("td", {}, rank.device || "–"),
    element("td", { class: "n" }, String(rank.steps)), element("td", { class: "n" }, ms(rank.own_ns)),
    element("td", { class: rank.state }, activity(rank)), element("td", { class: "n" }, String(rank.dropped)))));
}

function activity({ state, goodbye, pulse, last_seen_ns }) {
  if (goodbye) return "finished";
  if (state === "failed") return `failed (${ago(last_seen_ns)})`;
  if (!pulse) return ago(last_seen_ns);
  const bucket = pulse.bucket === null ? "" : `, bucket ${pulse.module > 0 ? `${pulse.module}.` : ""}${pulse.bucket}`;  // null: no bucket was launched yet.
  const stuck = state === "hung" ? `stuck for ${(pulse.idle_ns / 1e9).toFixed(0)} s${pulse.place && ` at ${pulse.place}`}: ` : "";
  return `${stuck}${pulse.phase.replace("_", " ")}, step ${pulse.step}${bucket} (${ago(last_seen_ns)})`;
}

// The list of attempts, unless there is only one and it gave no reason to look.
function showAttempts(attempts, latest) {
  by("attempts").hidden = attempts.length < 2 && !attempts.some(({ reason }) => reason);
  by("attempts").querySelector("tbody").replaceChildren(...attempts.toReversed().slice(0, SHOWN_ATTEMPTS).map((row) => {
    const link = element("a", { href: row.attempt === latest ? location.pathname : `?attempt=${row.attempt}` }, `attempt ${row.ordinal + 1}`);
    if (row.attempt === (attempt ?? latest)) link.setAttribute("aria-current", "true");
    const first = row.first_rank === null ? "" : `rank ${row.first_rank}: `;
    return element("tr", {}, element("td", {}, link),
      element("td", {}, element("span", { class: `state ${row.outcome}` }, row.outcome)), element("td", {}, first + row.reason),
      element("td", { class: "n" }, String(row.steps)), element("td", { class: "muted" }, ago(row.began_ns)),
      element("td", { class: "muted" }, row.ended_ns === null ? "–" : ago(row.ended_ns)));
  }));
}

function showUnused({ unused }) {
  const latest = new Map(unused.map((set) => [`${set.rank}/${set.module}`, set]));
  const sets = [...latest.values()].filter((set) => set.locally.length);
  by("unused").hidden = sets.length === 0;
  by("unused").querySelector("ul").replaceChildren(...sets.map((set) => element("li", {}, `rank ${set.rank}, since step ${set.step}: ${set.locally.slice(0, 20).join(", ")}${set.locally.length > 20 ? ` and ${set.locally.length - 20} more` : ""}`)));
}

// Indices of ranks: first the ranks in findings, then the ranks with the largest sum of excess.
function bySlowness({ ranks, excess_ns }, findings) {
  const named = new Set(findings.flatMap((finding) => finding.ranks));
  const sums = ranks.map((_, index) => excess_ns.reduce((sum, row) => sum + row[index], 0));
  return ranks.map((_, index) => index).sort((a, b) => named.has(ranks[b]) - named.has(ranks[a]) || sums[b] - sums[a]);
}

// A response that would be too long ends before the latest step: request fewer steps of many ranks.
function limitSteps() {
  last = Math.max(0, ...ranks.map((rank) => rank.last_step));
  count = Math.min(SHOWN_STEPS, Math.max(2, Math.floor(SHOWN_ROWS / ranks.length)));
}

function stepsNote() {
  return count < Math.min(SHOWN_STEPS, last + 1) ? `The latest ${count} steps only, because there are many ranks.` : "";
}

function until(step) {
  return `from=${Math.max(0, step - count + 1)}&to=${step}`;
}

// With uneven inputs the ranks' step numbers drift apart, until no range covers the latest steps of all ranks.
function stepsDiffer() {
  const ends = ranks.filter((rank) => rank.steps).map((rank) => rank.last_step);
  return Math.max(...ends) - Math.min(...ends) > count / 4;
}

function setText(id, ...sentences) {
  by(id).textContent = sentences.filter(Boolean).join(" ");
}

function absentNote(present) {
  const shown = new Set(present), absent = ranks.map(({ rank }) => rank).filter((rank) => !shown.has(rank));
  if (!shown.size || !absent.length) return "";
  const more = absent.length - NAMED_RANKS;
  return `No data of rank ${absent.slice(0, NAMED_RANKS).join(", ")}${more > 0 ? ` and ${more} more` : ""}.`;
}

function ranksNote(shown, all) {
  return shown < all ? `${shown} of ${all} ranks: first the ranks in findings, then the slowest.` : "";
}

async function choose(step) {
  if (!straggler) return;
  chosen = step;
  by("step").value = step;
  showHeat();
  await showBuckets(step);
}

function showHeat() {
  const shown = slowest.slice(0, SHOWN_RANKS);
  heat(by("heat"), straggler, shown, chosen, pick);
  setText("heat-shown", stepsDiffer() ? "" : stepsNote(), ranksNote(shown.length, slowest.length), absentNote(straggler.ranks));
}

async function showBuckets(step) {
  const { columns } = await get(address("spans", `from=${step}&to=${step}`));
  if (step !== chosen) return;
  const spans = columns.rank.map((rank, row) => ({
    rank, module: columns.module[row], revision: columns.revision[row], bucket: columns.bucket[row],
    ready: columns.aligned_ready_ns[row], launched: columns.aligned_launched_ns[row], done: columns.aligned_done_ns[row],
  }));
  const present = new Set(columns.rank), order = slowest.map((index) => straggler.ranks[index]).filter((rank) => present.has(rank));
  const drawn = new Set((order.length ? order : [...present]).slice(0, Math.max(2, Math.floor((SHOWN_SPANS * present.size) / spans.length))));
  timeline(by("timeline"), spans.filter((span) => drawn.has(span.rank)), layouts);
  setText("timeline-shown", ranksNote(drawn.size, present.size), absentNote(present));
}

function pick(step) {
  if (Number.isSafeInteger(step) && step >= 0) return runOnce(() => choose(step), by("timeline"), by("timeline-shown"));
  by("step").value = chosen;
  notice("A step is a whole number, 0 or greater.");
}

async function show() {
  const details = await get(base);
  ({ ranks } = await get(address("ranks")));
  limitSteps();
  const range = stepsDiffer() ? "" : until(last);  // Without a range the collector compares each rank's latest steps.
  const [diagnostics, layout, stragglers, unused, { attempts }] = await Promise.all([
    get(address("diagnostics")), get(address("layout")), get(address("stragglers", range)), get(address("unused")), get(`${base}/attempts`)]);
  const shown = attempts.find((row) => row.attempt === (attempt ?? details.attempt)), isLatest = shown?.attempt === details.attempt;
  [straggler, layouts] = [stragglers, layout.layouts];
  slowest = bySlowness(stragglers, diagnostics.findings);
  const counts = isLatest || !shown ? details : shown, state = counts === details ? details.state : shown.outcome;
  const facts = [`${counts.ranks} of ${counts.world_size} ranks`, `${counts.steps} steps`, `attempt ${shown ? shown.ordinal + 1 : attempts.length}`,
    details.modules.map((module) => module.name).join(", "), `last seen ${ago(counts.last_seen_ns ?? counts.ended_ns)}`];
  by("facts").replaceChildren(element("span", { class: `state ${state}` }, state), ` · ${facts.filter(Boolean).join(" · ")}`);
  showAttempts(attempts, details.attempt);
  showFindings(diagnostics);
  showRanks();
  await Promise.all([showWhole(diagnostics), showPhases()]);
  showUnused(unused);
  await choose(chosen ?? straggler.steps.at(Math.floor(straggler.steps.length / 2)) ?? last);
  // Only goodbyes end a run: a stalled run may continue, and a lost or failed run may return under its id.
  return isLatest ? { finished: false, lost: 15, failed: 15 }[details.state] : false;
}

by("rank").addEventListener("change", () => runOnce(showPhases, by("phases")));
by("step").addEventListener("change", (event) => pick(event.target.valueAsNumber));
refresh(show, 5);
