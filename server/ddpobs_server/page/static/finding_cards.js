// The findings of a run, first on its page. A click on one selects its steps, rank and bucket.

import { root } from "./api.js";
import { element, factRows, renew } from "./elements.js";
import { evidence, stacks, stepsText } from "./evidence.js";
import { findingLines, isShown, severityMark } from "./finding_parts.js";
import { rove } from "./roving.js";

const CONTROLS = ".finding-title, .code, summary, .quiet";

export function showFindings(section, { findings, missing, summary, steps_seen }, keys, chosen, select) {
  const open = new Set([...section.querySelectorAll("details[open]")].map((details) => details.dataset.key));
  const stops = [...section.querySelectorAll("[tabindex='0']")].filter((control) => control.checkVisibility());
  const stopKeys = new Set(stops.map((control) => control.dataset.key));
  const cards = findings
    .map((finding, index) => [finding, keys[index]])
    .filter(([finding]) => isShown(finding))
    .map(([finding, key]) => card(finding, key, key === chosen, open, select, steps_seen > 0));
  for (const each of cards) rove(each, CONTROLS, (control) => stopKeys.has(control.dataset.key));
  if (!cards.length) cards.push(element("article", { class: "finding" }, element("h2", {}, summary)));
  if (missing.length) cards.push(notJudged(missing, open));
  renew(section, element("div", {}, ...cards));
}

function card(finding, key, isChosen, open, select, hasSteps) {
  const classes = `finding ${finding.severity}${isChosen ? " chosen" : ""}`;
  const choose = () => select(finding, key);
  const lines = element("dl", { class: "parts" }, ...factRows(findingLines(finding)));
  return element(
    "article",
    { class: classes, "data-finding": key },
    element(
      "div",
      { class: "verdict" },
      severityMark(finding.severity),
      heading(finding, key, isChosen, choose),
      help(finding, key),
    ),
    lines,
    ...stacks(finding),
    element("div", { class: "row" }, details(finding, key, open, hasSteps), show(key, isChosen, choose)),
  );
}

function heading(finding, key, isChosen, choose) {
  const attributes = {
    type: "button",
    class: "finding-title",
    "aria-pressed": isChosen,
    "data-key": `title ${key}`,
  };
  const title = element("button", attributes, finding.verdict);
  title.addEventListener("click", choose);
  return element("h2", {}, title);
}

function help({ code }, key) {
  const link = { class: "code", href: `${root}/help/${code}`, target: "_blank", "aria-label": `help on ${code}` };
  return element("a", { ...link, "data-key": `help ${key}` }, `${code} ↗`);
}

function details(finding, key, open, hasSteps) {
  const title = hasSteps ? `Evidence, ${stepsText(...finding.steps)}` : "Evidence";
  const summary = element("summary", { "data-key": `summary ${key}` }, title);
  const node = element("details", { "data-key": key }, summary, evidence(finding, key, hasSteps));
  node.toggleAttribute("open", open.has(key));
  return node;
}

function show(key, isChosen, choose) {
  const button = element(
    "button",
    { type: "button", class: "quiet", "data-key": `show ${key}` },
    "show in the figures ↓",
  );
  button.addEventListener("click", () => {
    if (!isChosen) choose();
    const selection = document.getElementById("selection");
    selection.focus({ preventScroll: true });
    selection.scrollIntoView({ block: "start" });
  });
  return button;
}

function notJudged(missing, open) {
  const reasons = missing.map((reason) => element("li", {}, reason));
  const kinds = missing.length === 1 ? "kind" : "kinds";
  const summary = element(
    "summary",
    { "data-key": "summary missing" },
    `${missing.length} ${kinds} of finding could not be judged`,
  );
  const node = element("details", { "data-key": "missing" }, summary, element("ul", {}, ...reasons));
  node.open = open.has("missing");
  return node;
}
