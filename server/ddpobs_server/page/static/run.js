// The page of one run: its findings, then its step times, ranks and buckets.

import { ago, element, get, ms, notice, refresh, root, runOnce, saveWithToken } from "./api.js";
import { heat, PHASES, phases, timeline } from "./charts.js";

const SHOWN_STEPS = 500, SHOWN_ROWS = 400_000, SHOWN_RANKS = 32, SHOWN_SPANS = 200, NAMED_RANKS = 12;
const run = decodeURIComponent(location.pathname.split("/").at(-1));
const base = `/runs/${encodeURIComponent(run)}`;
const by = (id) => document.getElementById(id);
let ranks = [], last = 0, count = SHOWN_STEPS, straggler = null, slowest = [], layouts = [], chosen = null;

by("title").textContent = run;
document.title = `${run} · ddpobs`;
by("trace").href = `${root}/api/v1${base}/trace`;
saveWithToken(by("trace"), "trace.json");
by("phase-legend").append(...PHASES.map((phase) => element("span", {}, element("span", { class: `swatch ${phase}` }), phase.replace("_", " "))));

function findingCard(finding) {
  const evidence = Object.entries(finding.evidence).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, readable(name, value))]);
  const card = element("article", { class: `finding ${finding.severity}` },
    element("span", { class: "badge" }, `${finding.severity} · ${finding.code}`),
    element("h3", {}, finding.title),
    element("p", {}, finding.remedy));
  if (finding.gain) card.append(element("p", {}, `The remedy would gain ${ms(finding.gain.step_ns)} per step, ${(100 * finding.gain.ratio).toFixed(0)} % of it (± ${(100 * finding.gain.ratio * finding.gain.error_ratio).toFixed(1)} %).`));
  if (finding.buckets.length) card.append(element("p", { class: "muted" }, `Most of it occurs at bucket ${finding.buckets.join(", ")}: ${finding.parameters.slice(0, 6).join(", ")}${finding.parameters.length > 6 ? ", …" : ""}`));
  card.append(element("details", {}, element("summary", {}, `Evidence, steps ${finding.steps[0]} to ${finding.steps[1]}`), element("dl", {}, ...evidence)));
  return card;
}

function readable(name, value) {
  if (value !== null && typeof value === "object") return Object.entries(value).map(([key, inner]) => `${key}: ${readable(name, inner)}`).join(", ") || "–";
  return name.endsWith("_ns") ? ms(value) : String(value);
}

function showFindings({ findings, missing, steps_seen }) {
  const cards = findings.map(findingCard);
  if (!cards.length) cards.push(element("article", { class: "finding" }, element("h3", {}, steps_seen ? `Nothing found in the latest steps, up to step ${steps_seen - 1}.` : "No step to judge yet.")));
  if (missing.length) cards.push(element("p", { class: "muted" }, `Not judged yet: ${missing.join("; ")}`));
  by("findings").replaceChildren(...cards);
}

async function showPhases() {
  const choice = by("rank").value, rank = ranks.find((candidate) => String(candidate.rank) === choice);
  const query = rank ? `${until(rank.last_step)}&rank=${choice}` : `${until(last)}&mean=true`;
  const { columns } = await get(`${base}/steps?${query}`);
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
    element("td", {}, activity(rank)), element("td", { class: "n" }, String(rank.dropped)))));
}

function activity({ goodbye, pulse, last_seen_ns }) {
  if (goodbye) return "finished";
  if (!pulse) return ago(last_seen_ns);
  const bucket = pulse.bucket < 0 ? "" : `, bucket ${pulse.module > 0 ? `${pulse.module}.` : ""}${pulse.bucket}`;  // -1: no bucket was launched yet.
  return `${pulse.phase.replace("_", " ")}, step ${pulse.step}${bucket} (${ago(last_seen_ns)})`;
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
  const { columns } = await get(`${base}/spans?from=${step}&to=${step}`);
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
  ({ ranks } = await get(`${base}/ranks`));
  limitSteps();
  const range = stepsDiffer() ? "" : `?${until(last)}`;  // Without a range the collector compares each rank's latest steps.
  const [diagnostics, layout, stragglers, unused] = await Promise.all([
    get(`${base}/diagnostics`), get(`${base}/layout`), get(`${base}/stragglers${range}`), get(`${base}/unused`)]);
  [straggler, layouts] = [stragglers, layout.layouts];
  slowest = bySlowness(stragglers, diagnostics.findings);
  const facts = [details.state, `${details.ranks} of ${details.world_size} ranks`, `${details.steps} steps`, `attempt ${details.attempts.length}`,
    details.modules.map((module) => module.name).join(", "), `last seen ${ago(details.last_seen_ns)}`];
  by("facts").textContent = facts.filter(Boolean).join(" · ");
  showFindings(diagnostics);
  showRanks();
  await showPhases();
  showUnused(unused);
  await choose(chosen ?? straggler.steps.at(Math.floor(straggler.steps.length / 2)) ?? last);
  // Only goodbyes end a run: a stalled run may continue, and a lost run may return under its id.
  return { finished: false, lost: 15 }[details.state];
}

by("rank").addEventListener("change", () => runOnce(showPhases, by("phases")));
by("step").addEventListener("change", (event) => pick(event.target.valueAsNumber));
refresh(show, 5);
