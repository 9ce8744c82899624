// One run: findings first, then where the time went.

import { ago, element, get, ms, notice, refresh, saveWithToken, tell } from "./api.js";
import { heat, PHASES, phases, timeline } from "./charts.js";

const SHOWN_STEPS = 500, SHOWN_ROWS = 400_000, SHOWN_RANKS = 32, SHOWN_SPANS = 200, NAMED_RANKS = 12;
const run = decodeURIComponent(location.pathname.split("/").at(-1));
const base = `/runs/${encodeURIComponent(run)}`;
const by = (id) => document.getElementById(id);
let ranks = [], last = 0, count = SHOWN_STEPS, straggler = null, slowest = [], layouts = [], chosen = null;

by("title").textContent = run;
document.title = `${run} · ddpobs`;
by("trace").href = `/api/v1${base}/trace`;
saveWithToken(by("trace"), "trace.json");
by("phase-legend").append(...PHASES.map((phase) => element("span", {}, element("span", { class: `swatch ${phase}` }), phase.replace("_", " "))));

function finding(found) {
  const evidence = Object.entries(found.evidence).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, readable(name, value))]);
  const card = element("article", { class: `finding ${found.severity}` },
    element("span", { class: "badge" }, `${found.severity} · ${found.code}`),
    element("h3", {}, found.title),
    element("p", {}, found.remedy));
  if (found.gain) card.append(element("p", {}, `Would gain ${ms(found.gain.step_ns)} a step, ${(100 * found.gain.ratio).toFixed(0)} % of it (± ${(100 * found.gain.ratio * found.gain.error_ratio).toFixed(1)} %).`));
  if (found.buckets.length) card.append(element("p", { class: "muted" }, `Most of it arises at bucket ${found.buckets.join(", ")}: ${found.parameters.slice(0, 6).join(", ")}${found.parameters.length > 6 ? ", …" : ""}`));
  card.append(element("details", {}, element("summary", {}, `Evidence, steps ${found.steps[0]} to ${found.steps[1]}`), element("dl", {}, ...evidence)));
  return card;
}

function readable(name, value) {
  if (value !== null && typeof value === "object") return Object.entries(value).map(([key, inner]) => `${key}: ${readable(name, inner)}`).join(", ") || "–";
  return name.endsWith("_ns") ? ms(value) : String(value);
}

function showFindings({ findings, missing, steps_seen }) {
  const cards = findings.map(finding);
  if (!cards.length) cards.push(element("article", { class: "finding" }, element("h3", {}, steps_seen ? `Nothing found in the latest steps, up to step ${steps_seen - 1}.` : "No step to judge yet.")));
  if (missing.length) cards.push(element("p", { class: "muted" }, `Not judged yet: ${missing.join("; ")}`));
  by("findings").replaceChildren(...cards);
}

async function showPhases() {
  const rank = by("rank").value, one = ranks.find((known) => String(known.rank) === rank);
  const wanted = one ? `${until(one.last_step)}&rank=${rank}` : `${until(last)}&mean=true`;
  const { columns } = await get(`${base}/steps?${wanted}`);
  if (by("rank").value !== rank) return;  // Another was chosen meanwhile.
  const abreast = ranks.filter((known) => known.steps && known.last_step > last - count);
  say("phases-shown", fewer(), one ? "" : without(abreast.map((known) => known.rank)));
  phases(by("phases"), columns.step.map((step, row) => ({
    step, wall: columns.wall_ns?.[row] ?? columns.end_ns[row] - columns.start_ns[row],
    ...Object.fromEntries(PHASES.map((phase) => [phase, columns[`${phase}_ns`][row]])),
  })));
}

function showRanks() {
  const select = by("rank"), before = select.value || "mean";
  select.replaceChildren(element("option", { value: "mean" }, "mean of all"), ...ranks.map((rank) => element("option", { value: rank.rank }, `rank ${rank.rank}`)));
  select.value = before;
  by("ranks").tBodies[0].replaceChildren(...ranks.map((rank) => element("tr", {},
    element("td", { class: "n" }, String(rank.rank)), element("td", {}, rank.host || "–"), element("td", {}, rank.device || "–"),
    element("td", { class: "n" }, String(rank.steps)), element("td", { class: "n" }, ms(rank.own_ns)),
    element("td", {}, doing(rank)), element("td", { class: "n" }, String(rank.dropped)))));
}

function doing({ goodbye, pulse, last_seen_ns }) {
  if (goodbye) return "finished";
  if (!pulse) return ago(last_seen_ns);
  const bucket = pulse.bucket < 0 ? "" : `, bucket ${pulse.module > 0 ? `${pulse.module}.` : ""}${pulse.bucket}`;  // None was launched yet.
  return `${pulse.phase.replace("_", " ")}, step ${pulse.step}${bucket} (${ago(last_seen_ns)})`;
}

function showUnused({ unused }) {
  const latest = new Map(unused.map((set) => [`${set.rank}/${set.module}`, set]));
  const sets = [...latest.values()].filter((set) => set.locally.length);
  by("unused").hidden = sets.length === 0;
  by("unused").querySelector("ul").replaceChildren(...sets.map((set) => element("li", {}, `rank ${set.rank}, since step ${set.step}: ${set.locally.slice(0, 20).join(", ")}${set.locally.length > 20 ? ` and ${set.locally.length - 20} more` : ""}`)));
}

// Places of ranks: first those that findings name, then those that kept the others waiting most.
function bySlowness({ ranks, excess_ns }, findings) {
  const named = new Set(findings.flatMap((found) => found.ranks));
  const sums = ranks.map((_, place) => excess_ns.reduce((sum, row) => sum + row[place], 0));
  return ranks.map((_, place) => place).sort((a, b) => named.has(ranks[b]) - named.has(ranks[a]) || sums[b] - sums[a]);
}

// The collector ends an answer that would be too long before the latest step: fewer are asked for.
function limit() {
  last = Math.max(0, ...ranks.map((rank) => rank.last_step));
  count = Math.min(SHOWN_STEPS, Math.max(2, Math.floor(SHOWN_ROWS / ranks.length)));
}

function fewer() {
  return count < Math.min(SHOWN_STEPS, last + 1) ? `The latest ${count} steps, for there are many ranks.` : "";
}

function until(step) {
  return `from=${Math.max(0, step - count + 1)}&to=${step}`;
}

// With uneven inputs the ranks' own step numbers part, until no range holds the latest steps of all.
function apart() {
  const ends = ranks.filter((rank) => rank.steps).map((rank) => rank.last_step);
  return Math.max(...ends) - Math.min(...ends) > count / 4;
}

function say(place, ...sentences) {
  by(place).textContent = sentences.filter(Boolean).join(" ");
}

function without(present) {
  const shown = new Set(present), absent = ranks.map(({ rank }) => rank).filter((rank) => !shown.has(rank));
  if (!shown.size || !absent.length) return "";
  const more = absent.length - NAMED_RANKS;
  return `Nothing here of rank ${absent.slice(0, NAMED_RANKS).join(", ")}${more > 0 ? ` and ${more} more` : ""}.`;
}

function few(shown, all) {
  return shown < all ? `${shown} of ${all} ranks: those that findings name, then those that kept the others waiting most.` : "";
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
  say("heat-shown", apart() ? "" : fewer(), few(shown.length, slowest.length), without(straggler.ranks));
}

async function showBuckets(step) {
  const { columns } = await get(`${base}/spans?from=${step}&to=${step}`);
  if (step !== chosen) return;
  const spans = columns.rank.map((rank, row) => ({
    rank, module: columns.module[row], revision: columns.revision[row], bucket: columns.bucket[row],
    ready: columns.aligned_ready_ns[row], launched: columns.aligned_launched_ns[row], done: columns.aligned_done_ns[row],
  }));
  const told = new Set(columns.rank), order = slowest.map((place) => straggler.ranks[place]).filter((rank) => told.has(rank));
  const drawn = new Set((order.length ? order : [...told]).slice(0, Math.max(2, Math.floor((SHOWN_SPANS * told.size) / spans.length))));
  timeline(by("timeline"), spans.filter((span) => drawn.has(span.rank)), layouts);
  say("timeline-shown", few(drawn.size, told.size), without(told));
}

function pick(step) {
  if (Number.isSafeInteger(step) && step >= 0) return tell(() => choose(step), by("timeline"), by("timeline-shown"));
  by("step").value = chosen;
  notice("A step is a whole number, from 0 on.");
}

async function show() {
  const about = await get(base);
  ({ ranks } = await get(`${base}/ranks`));
  limit();
  const within = apart() ? "" : `?${until(last)}`;  // Without a range each rank's latest steps are compared.
  const [diagnostics, layout, stragglers, unused] = await Promise.all([
    get(`${base}/diagnostics`), get(`${base}/layout`), get(`${base}/stragglers${within}`), get(`${base}/unused`)]);
  [straggler, layouts] = [stragglers, layout.layouts];
  slowest = bySlowness(stragglers, diagnostics.findings);
  const facts = [about.state, `${about.ranks} of ${about.world_size} ranks`, `${about.steps} steps`, `attempt ${about.attempts.length}`,
    about.modules.map((module) => module.name).join(", "), `last heard of ${ago(about.last_seen_ns)}`];
  by("facts").textContent = facts.filter(Boolean).join(" · ");
  showFindings(diagnostics);
  showRanks();
  await showPhases();
  showUnused(unused);
  await choose(chosen ?? straggler.steps.at(Math.floor(straggler.steps.length / 2)) ?? last);
  // Only goodbyes are an end: what is stalled may step again, and what is lost come back under its id.
  return { finished: false, lost: 15 }[about.state];
}

by("rank").addEventListener("change", () => tell(showPhases, by("phases")));
by("step").addEventListener("change", (event) => pick(event.target.valueAsNumber));
refresh(show, 5);
