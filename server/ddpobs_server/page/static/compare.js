// Two runs compared: run b against run a.

import { element, get, ms, notice, root, runOnce, svg } from "./api.js";

const WIDTH = 220, HEIGHT = 22, DOT = 3.5, NAMES = 500;
const by = (id) => document.getElementById(id);
const KINDS = { compute: "computation", comm: "communication" };
const WORDS = { slower: "slower", faster: "faster", same: "no difference seen", "too-few": "not judged" };

function percent(ratio) {
  if (ratio === null) return "–";
  return (ratio > 0 ? "+" : ratio < 0 ? "−" : "") + size(ratio);
}

function size(ratio) {
  const value = Math.abs(100 * ratio);
  return `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

function range({ low_ratio, high_ratio }) {
  return low_ratio === null ? "–" : `${percent(low_ratio)} to ${percent(high_ratio)}`;
}

// The interval of a change on an axis from -`most` to `most`.
function interval(change, most) {
  if (change.change_ratio === null || change.verdict === "too-few") return element("span", { class: "muted" }, "–");
  const x = (ratio) => DOT + ((Math.max(-most, Math.min(most, ratio)) + most) / (2 * most)) * (WIDTH - 2 * DOT), middle = HEIGHT / 2;
  const band = { x: x(-change.smallest_ratio), width: x(change.smallest_ratio) - x(-change.smallest_ratio) };
  return svg("svg", { class: "interval", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": range(change) },
    svg("rect", { class: "unseen", y: 2, height: HEIGHT - 4, ...band }),
    svg("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: HEIGHT }),
    svg("line", { class: `bar ${change.verdict}`, x1: x(change.low_ratio), x2: Math.max(x(change.high_ratio), x(change.low_ratio) + 2), y1: middle, y2: middle }),
    svg("circle", { cx: x(change.change_ratio), cy: middle, r: DOT }));
}

function phaseTitle(phase) {
  return phase === "exposed_comm" ? "exposed communication" : phase;
}

function row(change, most) {
  const name = (change.kind === "phase" ? phaseTitle(change.name) : change.name) + (KINDS[change.kind] ? `, ${KINDS[change.kind]}` : "");
  const swatch = change.kind === "phase" ? [element("span", { class: `swatch ${change.name}` })] : [];
  const seen = change.verdict === "same" && change.smallest_ratio !== null ? ` (${size(change.smallest_ratio)} would have been)` : "";
  return element("tr", change.kind === "step" ? { class: "main" } : {},
    element("td", {}, ...swatch, name), element("td", { class: "n" }, ms(change.a_ns)), element("td", { class: "n" }, ms(change.b_ns)),
    element("td", { class: "n" }, percent(change.change_ratio)), element("td", {}, interval(change, most), element("span", { class: "muted" }, change.verdict === "too-few" ? "" : range(change))),
    element("td", { class: `verdict ${change.verdict}` }, WORDS[change.verdict] + seen));
}

// One axis for a table: the largest end of an interval that excludes zero, else of all.
function axis(changes) {
  const judged = changes.filter(({ verdict, change_ratio }) => verdict !== "too-few" && change_ratio !== null);
  const ends = judged.flatMap(({ low_ratio, high_ratio }) => [Math.abs(low_ratio), Math.abs(high_ratio)]);
  return Math.min(2, Math.max(0.02, ...ends));
}

function showVerdict({ a, b, changes, too_few, limit, disturbed }) {
  const [step] = changes, lines = [];
  const sentences = {
    slower: `${b.run} is slower: ${percent(step.change_ratio)} (${range(step)}) of a step of ${ms(step.a_ns)}`,
    faster: `${b.run} is faster: ${percent(step.change_ratio)} (${range(step)}) of a step of ${ms(step.a_ns)}`,
    same: `No difference of the step time was seen; a change of ${size(step.smallest_ratio)} would have been`,
    "too-few": "Too few steps to judge",
  };
  if (too_few) lines.push(`${too_few}.`);
  if (disturbed) lines.push(`Ranks had no processor for ${ms(a.run_delay_ns)} and ${ms(b.run_delay_ns)} of a step: other programs on the hosts may be the cause.`);
  const kept = limit.exceeded.length ? `exceeded by ${limit.exceeded.map(phaseTitle).join(", ")}` : "kept";
  lines.push(`Limit ${+(100 * limit.ratio).toFixed(2)} %: ${limit.decided ? kept : "not decided"}.`);
  lines.push(`${a.steps} and ${b.steps} steps are compared. Of them ${a.long_steps} and ${b.long_steps} are long steps, which only the row “long steps” includes.`);
  by("verdict").className = `card ${disturbed || step.verdict === "too-few" ? "unsure" : step.verdict}`;
  by("verdict").replaceChildren(element("h2", {}, sentences[step.verdict]), ...lines.map((line) => element("p", {}, line)));
}

function showFindings({ came, went, stayed }, { a, b }) {
  const lists = [[`Only in ${b.run}`, came], [`Only in ${a.run}`, went], ["In both", stayed]].filter(([, findings]) => findings.length);
  by("findings").replaceChildren(...(lists.length ? [] : [element("p", { class: "muted" }, "None in either run.")]), ...lists.map(([title, findings]) =>
    element("div", {}, element("h3", {}, title), element("ul", {}, ...findings.map((finding) => element("li", {}, element("span", { class: `severity ${finding.severity}` }, finding.severity), ` ${finding.title}`))))));
}

function show(answer) {
  const buckets = answer.changes.filter(({ kind }) => KINDS[kind]), times = answer.changes.filter(({ kind }) => !KINDS[kind]);
  showVerdict(answer);
  by("times").tBodies[0].replaceChildren(...times.map((change) => row(change, axis(times))));
  by("bucket-card").hidden = buckets.length === 0;
  const moved = buckets.filter(({ verdict }) => verdict === "slower" || verdict === "faster");
  by("bucket-note").textContent = `${buckets.length / 2} buckets have the same parameters in both runs. ${moved.length ? "Those that changed:" : "None changed:"}`;
  const shown = (moved.length ? moved : buckets).toSorted((x, y) => Math.abs(y.change_ns) - Math.abs(x.change_ns)).slice(0, 50);
  by("buckets").tBodies[0].replaceChildren(...shown.map((change) => row(change, axis(shown))));
  showFindings(answer.findings, answer);
  by("no-difference").hidden = answer.differences.length > 0;
  by("differences").hidden = answer.differences.length === 0;
  by("differences").tBodies[0].replaceChildren(...answer.differences.map(({ name, a, b }) => element("tr", {}, element("td", {}, name), element("td", {}, a === null ? "–" : String(a)), element("td", {}, b === null ? "–" : String(b)))));
  by("command").textContent = `ddpobs compare ${answer.a.run} ${answer.b.run} --fail-over ${+(100 * answer.limit.ratio).toFixed(2)}% --collector ${location.origin}${root}`;
  document.title = `${answer.a.run} and ${answer.b.run} · ddpobs`;
  by("answer").hidden = false;
}

async function compare() {
  const [a, b, limit] = ["a", "b", "limit"].map((id) => by(id).value.trim());
  history.replaceState(null, "", `?${new URLSearchParams({ a, b, ...(limit !== "3" && { limit }) })}`);
  by("answer").hidden = true;
  notice("Comparing…");
  const query = new URLSearchParams({ with: b, limit: String(Number(limit) / 100) });
  show(await get(`/runs/${encodeURIComponent(a)}/compare?${query}`));
}

async function suggest() {
  const { runs } = await get(`/runs?limit=${NAMES}`);
  by("names").replaceChildren(...runs.map((run) => element("option", { value: run.run })));
}

by("choice").addEventListener("submit", (event) => {
  event.preventDefault();
  runOnce(compare);
});
by("swap").addEventListener("click", () => {
  [by("a").value, by("b").value] = [by("b").value, by("a").value];
  if (by("a").value && by("b").value) runOnce(compare);
});
const query = new URLSearchParams(location.search);
for (const id of ["a", "b", "limit"]) if (query.has(id)) by(id).value = query.get(id);
if (by("a").value && by("b").value) await runOnce(compare);
runOnce(suggest);
