// Facts of a run as text: its state, its ranks, attempts, settings and unused parameters.

import { ago, element, ms } from "./api.js";

const SHOWN_ATTEMPTS = 50, SHOWN_RANKS = 2000, SHOWN_NAMES = 20;
const CLOCK = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23", timeZoneName: "short" });
const by = (id) => document.getElementById(id);

// A time of day in the reader's zone, with the zone.
export function clock(ns) {
  return CLOCK.format(new Date(ns / 1e6));
}

export function showFacts(details, shown, attempts, ranks) {
  const isLatest = !shown || shown.attempt === details.attempt, counts = isLatest ? details : shown;
  const state = isLatest ? details.state : shown.outcome;
  const hosts = new Set(ranks.map(({ host }) => host).filter(Boolean)).size;
  const number = shown ? shown.ordinal + 1 : attempts.length;
  const ended = shown && shown.ended_ns !== null ? clock(shown.ended_ns) : "now";
  const facts = [
    `${counts.ranks} of ${counts.world_size} ranks${hosts ? ` on ${hosts} ${hosts === 1 ? "host" : "hosts"}` : ""}`,
    `${counts.steps} steps`, `attempt ${number} of ${attempts.length}`, details.modules.map(({ name }) => name).join(", "),
    shown ? `${clock(shown.began_ns)} to ${ended}` : "", `last seen ${ago(counts.last_seen_ns ?? counts.ended_ns)}`];
  by("facts").replaceChildren(element("span", { class: `state ${state}` }, state), ` · ${facts.filter(Boolean).join(" · ")}`);
}

export function showRanks(ranks, match, select) {
  const shown = ranks.filter(match).slice(0, SHOWN_RANKS);
  by("rank-list").replaceChildren(...ranks.slice(0, SHOWN_RANKS).map(({ rank }) => element("option", { value: rank })));
  by("processes").tBodies[0].replaceChildren(...shown.map((row) => {
    const button = element("button", { type: "button", class: "link" }, String(row.rank));
    button.addEventListener("click", () => select(row.rank));
    return element("tr", {}, element("td", { class: "n" }, button), element("td", {}, row.host || "–"), element("td", {}, row.device || "–"),
      element("td", { class: "n" }, String(row.steps)), element("td", { class: "n" }, ms(row.own_ns)),
      element("td", { class: row.state }, activity(row)), element("td", { class: "n" }, String(row.dropped)));
  }));
}

function activity({ state, goodbye, pulse, last_seen_ns }) {
  if (goodbye) return "finished";
  if (state === "failed" || state === "interrupted") return `${state} (${ago(last_seen_ns)})`;
  if (!pulse) return ago(last_seen_ns);
  const bucket = pulse.bucket === null ? "" : `, bucket ${pulse.module > 0 ? `${pulse.module}.` : ""}${pulse.bucket}`;  // null: no bucket was launched yet.
  const stuck = state === "hung" ? `stuck for ${(pulse.idle_ns / 1e9).toFixed(0)} s${pulse.place && ` at ${pulse.place}`}: ` : "";
  return `${stuck}${pulse.phase.replace("_", " ")}, step ${pulse.step}${bucket} (${ago(last_seen_ns)})`;
}

// The list of attempts, unless there is only one and it gave no reason to look.
export function showAttempts(attempts, shown, latest) {
  by("attempts").hidden = attempts.length < 2 && !attempts.some(({ reason }) => reason);
  by("attempts").querySelector("tbody").replaceChildren(...attempts.toReversed().slice(0, SHOWN_ATTEMPTS).map((row) => {
    const link = element("a", { href: row.attempt === latest ? location.pathname : `?attempt=${row.ordinal + 1}` }, `attempt ${row.ordinal + 1}`);
    if (row === shown) link.setAttribute("aria-current", "true");
    const first = row.first_rank === null ? "" : `rank ${row.first_rank}: `;
    return element("tr", {}, element("td", {}, link),
      element("td", {}, element("span", { class: `state ${row.outcome}` }, row.outcome)), element("td", {}, first + row.reason),
      element("td", { class: "n" }, String(row.steps)), element("td", { class: "muted" }, clock(row.began_ns)),
      element("td", { class: "muted" }, row.ended_ns === null ? "–" : clock(row.ended_ns)));
  }));
}

// How the attempt before the shown one ended, and whether there is a later one.
export function showRestart(attempts, shown) {
  const index = attempts.indexOf(shown), before = attempts[index - 1], lines = [];
  if (before) lines.push(`This attempt is a restart: attempt ${before.ordinal + 1} ${before.outcome}${before.reason ? ` (${before.first_rank === null ? "" : `rank ${before.first_rank}: `}${before.reason})` : ""} after ${before.steps} steps.`);
  if (index >= 0 && index < attempts.length - 1) lines.push(`A later attempt exists: ${attempts.length} is the latest.`);
  by("restarted").hidden = lines.length === 0;
  by("restarted").textContent = lines.join(" ");
}

export function showUnused({ unused }) {
  const latest = new Map(unused.map((set) => [`${set.rank}/${set.module}`, set]));
  const sets = [...latest.values()].filter((set) => set.locally.length);
  by("unused").hidden = sets.length === 0;
  by("unused").querySelector("ul").replaceChildren(...sets.map((set) => element("li", {}, `rank ${set.rank}, since step ${set.step}: ${set.locally.slice(0, SHOWN_NAMES).join(", ")}${set.locally.length > SHOWN_NAMES ? ` and ${set.locally.length - SHOWN_NAMES} more` : ""}`)));
}

export function showSettings({ hello }) {
  by("settings").hidden = !hello;
  if (!hello) return;
  const facts = { backend: hello.backend, device: hello.device, ...hello.versions, ...hello.settings };
  by("settings").querySelector("dl").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, typeof value === "number" && !Number.isInteger(value) ? String(+value.toPrecision(4)) : String(value))]));
}

// The parameters of the selected bucket, with its size.
export function showBucket(layouts, choice) {
  const [module, bucket] = choice?.includes(".") ? choice.split(".").map(Number) : [0, Number(choice)];
  const own = layouts.filter((layout) => layout.module === module), layout = own.at(-1)?.buckets[bucket];
  by("bucket-facts").hidden = !choice || !layout;
  if (!choice || !layout) return;
  const elements = layout.parameters.reduce((sum, { size }) => sum + size, 0);
  by("bucket-facts").replaceChildren(
    element("h3", {}, `Bucket ${choice}`),
    element("p", {}, `${sizeText(layout.size_bytes)} ${layout.dtype}, ${counted(layout.parameters.length, "parameter")} with ${counted(elements, "element")}, number ${bucket + 1} of ${own.at(-1).buckets.length} in the order of launch`),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Parameters of bucket ${choice}` }, element("ul", {}, ...layout.parameters.slice(0, 500).map(({ name, size }) => element("li", {}, `${name} (${size.toLocaleString()})`)))));
}

function counted(number, noun) {
  return `${number.toLocaleString()} ${noun}${number === 1 ? "" : "s"}`;
}

function sizeText(bytes) {
  const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, least]) => bytes >= least) ?? ["B", 1];
  return `${+(bytes / size).toPrecision(3)} ${unit}`;
}

// The buckets that can be selected: those of each module's latest layout.
export function bucketNames(layouts) {
  const latest = new Map(layouts.map((layout) => [layout.module, layout]));
  return [...latest.values()].flatMap(({ module, buckets }) => buckets.map((_, index) => (module ? `${module}.${index}` : String(index))));
}
