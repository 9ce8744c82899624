// The parts of a finding in words: every page shows them in this order, with these labels.

import { element } from "./elements.js";

// As `ddpobs.shared.words.LABELS`.
const LABELS = { measure: "measure", when: "when", cause: "cause", where: "where", remedy: "do", gain: "saves" };
const MARKS = { critical: "●", warning: "◐", info: "○" };

// Findings that are not shown as such: "Where the time went" states them. As `ddpobs.shared.words.STATED_ELSEWHERE`.
const STATED_ELSEWHERE = ["scaling-loss"];

export function isShown({ code }) {
  return !STATED_ELSEWHERE.includes(code);
}

// The parts below the verdict, each with its label; empty parts are left out.
export function findingLines(finding) {
  const parts = { ...finding, gain: finding.gain?.text };
  return Object.entries(LABELS)
    .filter(([part]) => parts[part])
    .map(([part, label]) => [label, parts[part]]);
}

// The mark of a severity differs in form and in colour.
export function severityMark(severity) {
  return element("span", { class: `mark ${severity}`, role: "img", "aria-label": severity }, MARKS[severity]);
}

export function severityBadge(severity) {
  return element("span", { class: `severity ${severity}` }, severity);
}
