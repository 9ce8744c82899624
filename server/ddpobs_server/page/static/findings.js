// The findings of a run, first on its page. A click on one selects its steps, rank and bucket.

import { element, ms } from "./api.js";
import { clock } from "./facts.js";

const SHOWN_STACKS = 4, SHOWN_INTERVALS = 3, SHOWN_PARAMETERS = 6;

export function showFindings(section, { findings, missing, steps_seen }, keys, chosen, select) {
  const open = new Set([...section.querySelectorAll("details[open]")].map((details) => details.dataset.key));
  const cards = findings.map((finding, index) => card(finding, keys[index], keys[index] === chosen, open, select));
  if (!cards.length) cards.push(element("article", { class: "finding" }, element("h2", {}, steps_seen ? `Nothing found up to step ${steps_seen - 1}.` : "No step to judge yet.")));
  if (missing.length) {
    const details = element("details", { "data-key": "missing" }, element("summary", {}, `${missing.length} not judged yet`), element("ul", {}, ...missing.map((reason) => element("li", {}, reason))));
    details.open = open.has("missing");
    cards.push(details);
  }
  // A refresh that changes nothing leaves focus and text selection alone.
  const fresh = element("div", {}, ...cards);
  if (section.firstElementChild?.isEqualNode(fresh)) return;
  const focused = section.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  section.replaceChildren(fresh);
  if (focused) section.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function card(finding, key, isChosen, open, select) {
  const title = element("button", { type: "button", class: "finding-title", "aria-pressed": String(isChosen), "data-key": `title ${key}` }, finding.title);
  title.addEventListener("click", () => select(finding, key));
  const details = element("details", { "data-key": key }, element("summary", { "data-key": `summary ${key}` }, `Evidence, ${stepsText(...finding.steps)}`),
    element("dl", {}, ...Object.entries(finding.evidence).filter(([, value]) => value !== null).flatMap(([name, value]) => [element("dt", {}, words(name)), element("dd", {}, readable(name, value))])));
  details.toggleAttribute("open", open.has(key));
  return element("article", { class: `finding ${finding.severity}${isChosen ? " chosen" : ""}`, "data-finding": key },
    element("span", { class: "badge" }, `${finding.severity} · ${finding.code}`), gain(finding),
    element("h2", {}, title), ...times(finding.intervals), element("p", {}, element("b", {}, "Do: "), finding.remedy),
    ...stacks(finding), ...parameters(finding), details);
}

function gain({ gain: value }) {
  if (!value) return "";
  const error = 100 * value.ratio * value.error_ratio;
  return element("span", { class: "gain" }, `gain −${(100 * value.ratio).toFixed(0)} % of the ${value.whole ?? "step"} (± ${error.toFixed(1)} %), ${ms(value.step_ns)} a step`);
}

function stepsText(first, last) {
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}

// When a finding held, in the reader's own zone.
function times(intervals) {
  const known = intervals.filter(({ began_ns }) => began_ns !== null);
  const lines = known.slice(0, SHOWN_INTERVALS).map(({ from, to, began_ns, ended_ns }) => `${stepsText(from, to)}: ${clock(began_ns)} to ${clock(ended_ns)}`);
  if (known.length > SHOWN_INTERVALS) lines.push(`and ${known.length - SHOWN_INTERVALS} more`);
  return lines.length ? [element("p", { class: "muted" }, lines.join("; "))] : [];
}

// The traceback of a crash, or the stacks of the ranks that a hang names.
function stacks({ ranks, evidence }) {
  if (evidence.traceback) return [element("pre", {}, evidence.traceback)];
  const known = ranks.filter((rank) => evidence.stacks?.[rank]?.length).slice(0, SHOWN_STACKS);
  return known.map((rank) => element("pre", {}, [`Rank ${rank}:`, ...evidence.stacks[rank]].join("\n  ")));
}

function parameters({ code, buckets, parameters: names }) {
  if (!buckets.length) return [];
  const where = code === "straggler" ? "Most of it occurs at" : "At";
  const more = names.length > SHOWN_PARAMETERS ? ", …" : "";
  return [element("p", { class: "muted" }, `${where} bucket ${buckets.join(", ")}: ${names.slice(0, SHOWN_PARAMETERS).join(", ")}${more}`)];
}

function words(name) {
  return name.replace(/_(ns|bytes|permille)$/, "").replaceAll("_", " ");
}

function readable(name, value) {
  if (value === null) return "not known";
  if (Array.isArray(value)) return value.map((inner) => readable(name, inner)).join(name === "stacks" ? "\n" : ", ") || "–";
  if (typeof value === "object") return Object.entries(value).map(([key, inner]) => `${words(key)}: ${readable(key.endsWith("_ns") ? key : name, inner)}`).join(", ") || "–";
  if (typeof value === "number" && name.endsWith("_ns")) return ms(value);
  if (typeof value === "number" && name.endsWith("_share")) return `${(100 * value).toPrecision(3)} %`;
  return typeof value === "number" && !Number.isInteger(value) ? String(+value.toPrecision(4)) : String(value);
}
