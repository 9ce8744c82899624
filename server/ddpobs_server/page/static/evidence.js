// The evidence of a finding: its figures by name, the steps in which it held, and the stacks that it rests on.

import { element, factRows } from "./elements.js";
import { clock, ms, short } from "./times.js";

const MAX_STACKS = 4;
const MAX_INTERVALS = 3;

export function evidence(finding) {
  const facts = Object.entries(finding.evidence).map(([name, value]) => [words(name), readable(name, value)]);
  const names = finding.parameters.length ? [["parameters", finding.parameters.join(", ")]] : [];
  return element("dl", {}, ...factRows([["steps", intervals(finding.intervals)], ...names, ...facts]));
}

// The stacks of the ranks that a hang names, or the traceback of a crash that ended none.
export function stacks({ ranks, evidence: { traceback, stacks: byRank, threads } }) {
  const known = ranks.filter((rank) => byRank?.[rank]?.length).slice(0, MAX_STACKS);
  if (traceback && !known.length) return [element("pre", {}, traceback)];
  return known.flatMap((rank) => [
    element("pre", {}, [`Rank ${rank}:`, ...byRank[rank]].join("\n  ")),
    ...Object.entries(threads?.[rank] ?? {}).map(([thread, frames]) => {
      return element("pre", {}, [`Rank ${rank}, thread ${thread}:`, ...frames].join("\n  "));
    }),
  ]);
}

export function stepsText(first, last) {
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}

// When a finding held, in the reader's own zone.
function intervals(all) {
  const lines = all.slice(0, MAX_INTERVALS).map(({ from, to, began_ns, ended_ns }) => {
    const times = began_ns === null ? "" : `, ${clock(began_ns)} to ${clock(ended_ns)}`;
    return `${from === to ? from : `${from} to ${to}`}${times}`;
  });
  if (all.length > MAX_INTERVALS) lines.push(`and ${all.length - MAX_INTERVALS} more`);
  return lines.join("\n");
}

function words(name) {
  return name.replace(/_(ns|bytes|permille)$/, "").replaceAll("_", " ");
}

function readable(name, value) {
  if (value === null) return "not known";
  if (Array.isArray(value)) return readableList(name, value);
  if (typeof value === "object") return readableFacts(name, value);
  if (typeof value === "number" && name.endsWith("_ns")) return ms(value);
  if (typeof value === "number" && name.endsWith("_share")) return `${(100 * value).toPrecision(3)} %`;
  return short(value);
}

function readableList(name, values) {
  return values.map((inner) => readable(name, inner)).join(name === "stacks" ? "\n" : ", ") || "–";
}

function readableFacts(name, facts) {
  const texts = Object.entries(facts).map(([key, inner]) => {
    return `${words(key)}: ${readable(key.endsWith("_ns") ? key : name, inner)}`;
  });
  return texts.join(", ") || "–";
}
