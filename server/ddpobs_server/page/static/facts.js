// Facts of a run as text: its state, its ranks, attempts, settings and unused parameters.

import { byId, element, factRows, renew } from "./elements.js";
import { ago, clock, clockRange, duration, isKnown, short } from "./times.js";

// How a rank ended that did not finish, by its end.
const ENDS = { terminated: "ended by SIGTERM", died: "died", failed: "failed", interrupted: "interrupted" };
const MAX_ATTEMPTS = 50;
const MAX_RANKS = 2000;
const MAX_NAMES = 20;
const MAX_PARAMETERS = 500;

const cell = (content, attributes = {}) => element("td", attributes, content);
const number = (content) => cell(content, { class: "n" });

export function showFacts(details, shown, attempts, ranks) {
  const isLatest = !shown || shown.attempt === details.attempt;
  const counts = isLatest ? details : shown;
  const state = isLatest ? details.state : shown.outcome;
  const hosts = new Set(ranks.map(({ host }) => host).filter(isKnown)).size;
  const facts = [
    `${counts.ranks} of ${counts.world_size} ranks${hosts ? ` on ${counted(hosts, "host")}` : ""}`,
    counted(counts.steps, "step"),
    attempts.length > 1 ? `attempt ${shown ? shown.ordinal + 1 : attempts.length} of ${attempts.length}` : "",
    models(details.modules),
    ...timesOf(details.hello?.settings.imported, counts, shown),
  ];
  const text = ` · ${facts.filter(Boolean).join(" · ")}`;
  byId("facts").replaceChildren(element("span", { class: `state ${state}` }, state), text);
}

// An imported file has no class of its model, which is then named `model`.
function models(modules) {
  const names = modules.map(({ name }) => name).filter((name) => name !== "model");
  return names.length ? `model ${names.join(", ")}` : "";
}

// When a run trained, and when it was last seen. A trace may have no time of day; imported dumps have no step.
function timesOf(format, counts, shown) {
  const seen = ago((format ? null : shown?.ended_ns) ?? counts.last_seen_ns ?? counts.ended_ns);
  const range = shown?.began_ns ? clockRange(shown.began_ns, shown.ended_ns) : "";
  if (!format) return [range, `last seen ${seen}`];
  return [counts.steps ? range : "", `imported (${format}) ${seen}`];
}

// The table of ranks: the marked ones first, then by own time. Columns without a value are left out.
export function showRanks(ranks, marked, layouts, select) {
  const isEmpty = ["host", "device", "own_ns", "dropped"].map((name) => !ranks.some((row) => isKnown(row[name])));
  const [noHost, noDevice, noOwn, noDropped] = isEmpty;
  const hidden = [false, noHost, noDevice, false, noOwn, false, noDropped];
  const hide = (line) => hidden.forEach((isHidden, index) => (line.cells[index].hidden = isHidden));
  const options = ranks.slice(0, MAX_RANKS).map(({ rank }) => element("option", { value: rank }));
  renew(byId("rank-list"), ...options);
  const isMarked = new Set(marked);
  const order = (a, b) =>
    isMarked.has(b.rank) - isMarked.has(a.rank) || (b.own_ns ?? -1) - (a.own_ns ?? -1) || a.rank - b.rank;
  const sorted = ranks.toSorted(order).slice(0, MAX_RANKS);
  const rows = sorted.map((row, index) => rankRow(row, index, isMarked.has(row.rank), layouts, select));
  const table = byId("processes");
  for (const line of [table.tHead.rows[0], ...rows]) hide(line);
  renew(table.tBodies[0], ...rows);
}

function rankRow(row, index, isMarked, layouts, select) {
  const stop = { tabindex: index ? -1 : 0 }; // Arrow keys move from the first to the others.
  const attributes = { type: "button", class: "link", "data-key": `rank ${row.rank}`, ...stop };
  const button = element("button", attributes, String(row.rank));
  button.addEventListener("click", () => select(row.rank));
  const place = [cell(row.host || "–"), cell(row.device || "–")];
  const counts = [number(String(row.steps)), number(duration(row.own_ns))];
  const now = cell(activity(row, layouts), { class: row.state });
  const marks = isMarked ? { class: "chosen", "aria-current": "true" } : {};
  return element("tr", marks, number(button), ...place, ...counts, now, number(String(row.dropped)));
}

function activity({ state, goodbye, ended, pulse, stuck_pulse, last_seen_ns }, layouts) {
  if (goodbye) return "finished";
  if (ended === "imported") return pulse?.waits_in ? `waits in ${pulse.waits_in} (${pulse.place})` : "in no collective";
  if (ended in ENDS) {
    const stuck = isStuckAtEnd(pulse, stuck_pulse) ? `stuck${at(stuck_pulse)}, then ` : ""; // The finding has its time.
    return `${stuck}${ENDS[ended]} (${ago(last_seen_ns)})`;
  }
  if (!pulse) return ago(last_seen_ns);
  // The bucket is null before the first launch.
  const bucket = pulse.bucket === null ? "" : `, ${bucketTitle(layouts, pulse.module ?? 0, pulse.bucket)}`;
  const stuck = state === "hung" ? `stuck for ${(pulse.idle_ns / 1e9).toFixed(0)} s${at(pulse)}: ` : "";
  return `${stuck}${pulse.phase.replace("_", " ")}, step ${pulse.step}${bucket} (${ago(last_seen_ns)})`;
}

function at({ place }) {
  return place && ` at ${place}`;
}

// Whether a rank's end came before it went on from its last stuck pulse. As in `ddpobs stacks`.
function isStuckAtEnd(pulse, stuck) {
  return stuck && pulse.step <= stuck.step + 1;
}

// The list of attempts, unless there is only one and it gave no reason to look.
export function showAttempts(attempts, shown, latest) {
  byId("attempts").hidden = attempts.length < 2 && !attempts.some(({ reason }) => reason);
  const rows = attempts.toReversed().slice(0, MAX_ATTEMPTS);
  const nodes = rows.map((row) => attemptRow(row, row === shown, row.attempt === latest));
  renew(byId("attempts").querySelector("tbody"), ...nodes);
}

function attemptRow(row, isShown, isLatest) {
  const href = isLatest ? location.pathname : `?attempt=${row.ordinal + 1}`;
  const link = element("a", { href, "data-key": `attempt ${row.ordinal}` }, `attempt ${row.ordinal + 1}`);
  if (isShown) link.setAttribute("aria-current", "true");
  const outcome = element("span", { class: `state ${row.outcome}` }, row.outcome);
  const ends = [row.began_ns, row.ended_ns].map((ns) => (ns === null ? "–" : clock(ns)));
  const times = ends.map((text) => cell(text, { class: "muted" }));
  return element("tr", {}, cell(link), cell(outcome), cell(reasonOf(row)), number(String(row.steps)), ...times);
}

function reasonOf({ first_rank, reason }) {
  return (first_rank === null ? "" : `rank ${first_rank}: `) + reason;
}

// How the attempt before the shown one ended, and whether a later one exists. A crash by the same error has its text.
export function showRestart(attempts, shown, findings) {
  const index = attempts.indexOf(shown);
  const before = attempts[index - 1];
  const lines = [];
  if (before) {
    const isSame = findings.some(({ evidence }) => evidence.same_error > 1);
    const reason = isSame ? " with the same error" : before.reason ? `; ${reasonOf(before)}` : "";
    const end = `attempt ${before.ordinal + 1} ${before.outcome} after ${counted(before.steps, "step")}${reason}`;
    lines.push(`This attempt is ${before.outcome === "finished" ? "another training" : "a restart"}: ${end}.`);
  }
  if (index >= 0 && index < attempts.length - 1)
    lines.push(`A later attempt exists: ${attempts.length} is the latest.`);
  byId("restarted").hidden = lines.length === 0;
  byId("restarted").textContent = lines.join(" ");
}

export function showUnused({ unused }) {
  const latest = new Map(unused.map((set) => [`${set.rank}/${set.module}`, set]));
  const sets = [...latest.values()].filter((set) => set.locally.length);
  byId("unused").hidden = sets.length === 0;
  const lines = sets.map(({ rank, step, locally }) => `rank ${rank}, since step ${step}: ${listed(locally)}`);
  byId("unused")
    .querySelector("ul")
    .replaceChildren(...lines.map((line) => element("li", {}, line)));
}

function listed(names) {
  const more = names.length > MAX_NAMES ? ` and ${names.length - MAX_NAMES} more` : "";
  return names.slice(0, MAX_NAMES).join(", ") + more;
}

export function showSettings({ hello }) {
  const facts = { backend: hello?.backend, device: hello?.device, ...hello?.versions, ...hello?.settings };
  const known = Object.entries(facts).filter(([, value]) => value !== undefined && value !== "" && value !== "unknown");
  byId("settings").hidden = known.length === 0;
  const rows = known.map(([name, value]) => [name.replaceAll("_", " "), short(value)]);
  renew(byId("settings").querySelector("dl"), ...factRows(rows));
}

// A bucket or a unit's collective in words.
function bucketTitle(layouts, module, bucket) {
  return latestBuckets(layouts, module)?.[bucket]?.title ?? `bucket ${module}.${bucket}`;
}

function latestBuckets(layouts, module) {
  return layouts.findLast((layout) => layout.module === module)?.buckets;
}

// The parameters of the selected bucket, with its size.
export function showBucket(layouts, choice) {
  const [module, bucket] = (choice ?? "").split(".").map(Number);
  const buckets = latestBuckets(layouts, module);
  const layout = choice ? buckets?.[bucket] : undefined;
  byId("bucket-facts").hidden = !layout;
  if (!layout) return;
  const elements = layout.parameters.reduce((sum, { size }) => sum + size, 0);
  const content = `${counted(layout.parameters.length, "parameter")} with ${counted(elements, "element")}`;
  const order = `number ${bucket + 1} of ${buckets.length} in the order of launch`;
  const names = layout.parameters.slice(0, MAX_PARAMETERS);
  const lines = names.map(({ name, size }) => element("li", {}, `${name} (${size.toLocaleString()})`));
  const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": `Parameters of ${layout.title}` };
  renew(
    byId("bucket-facts"),
    element("h3", {}, capital(layout.title)),
    element("p", {}, `${sizeText(layout.size_bytes)} ${layout.dtype}, ${content}, ${order}`),
    element("div", region, element("ul", {}, ...lines)),
  );
}

export function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function counted(count, noun) {
  return `${count.toLocaleString()} ${noun}${count === 1 ? "" : "s"}`;
}

function sizeText(bytes) {
  const units = { GB: 1e9, MB: 1e6, kB: 1e3 };
  const [unit, size] = Object.entries(units).find(([, least]) => bytes >= least) ?? ["B", 1];
  return `${+(bytes / size).toPrecision(3)} ${unit}`;
}

// The buckets that can be selected, by name: those of each module's latest layout.
export function bucketTitles(layouts) {
  const latest = new Map(layouts.map((layout) => [layout.module, layout]));
  const named = ({ module, buckets }) => buckets.map(({ title }, index) => [`${module}.${index}`, title]);
  return [...latest.values()].flatMap(named);
}
