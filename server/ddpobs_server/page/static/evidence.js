// The evidence of a finding: its figures in sentences, the steps in which it held, and the stacks that it rests on.

import { root } from "./api.js";
import { element, factRows } from "./elements.js";
import { address } from "./run_state.js";
import { timeRange } from "./times.js";

const MAX_STACKS = 4;
const MAX_INTERVALS = 3;

export function evidence(finding, key, hasSteps) {
  const steps = hasSteps ? [["steps", intervals(finding.intervals)]] : [];
  const names = finding.parameters.length ? [["parameters", finding.parameters.join(", ")]] : [];
  const facts = element("dl", {}, ...factRows([...steps, ...names]));
  const sentences = finding.evidence_sentences.map((text) => element("li", {}, text));
  const link = { href: `${root}/api/v1${address("diagnostics")}`, target: "_blank", "data-key": `json ${key}` };
  const raw = element("a", link, "as JSON ↗");
  return element("div", {}, facts, element("ul", {}, ...sentences), raw);
}

// The stacks of the ranks that a hang names, or the traceback or the last output of a crash that ended none.
export function stacks({ ranks, evidence: { traceback, output, stacks: byRank, threads } }) {
  const known = ranks.filter((rank) => byRank?.[rank]?.length).slice(0, MAX_STACKS);
  if (!known.length) return [traceback, output].filter(Boolean).map((text) => element("pre", {}, text));
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

// When a finding held.
function intervals(all) {
  const lines = all.slice(0, MAX_INTERVALS).map(({ from, to, began_ns, ended_ns }) => {
    const times = began_ns === null ? "" : `, ${timeRange(began_ns, ended_ns)}`;
    return `${from === to ? from : `${from} to ${to}`}${times}`;
  });
  if (all.length > MAX_INTERVALS) lines.push(`and ${all.length - MAX_INTERVALS} more`);
  return lines.join("\n");
}
