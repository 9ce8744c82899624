// Two runs compared: run b against run a.

import { get, root } from "./api.js";
import { isOfBucket, showChanges } from "./changes.js";
import { byId, element, notice } from "./elements.js";
import { severityBadge } from "./finding_parts.js";
import { runOnce } from "./refresh.js";
import { duration, short } from "./times.js";

const MAX_NAMES = 500;
const MAX_BUCKETS = 50;
const DEFAULT_LIMIT = "3";

function showVerdict(response) {
  const { a, b, changes, not_the_same_job, limit, disturbed } = response;
  const lines = [];
  if (disturbed) {
    const delays = `Ranks had no processor for ${duration(a.run_delay_ns)} and ${duration(b.run_delay_ns)} of a step`;
    lines.push(`${delays}: other programs on the hosts may be the cause.`);
  }
  lines.push(`Limit ${limitPercent(limit)} %: ${limit.words}.`);
  const hasLong = a.long_steps > 0 || b.long_steps > 0;
  const long = hasLong ? `; long ones, ${a.long_steps} and ${b.long_steps}, are only in the row “long steps”` : "";
  lines.push(`${a.steps} and ${b.steps} typical steps are compared${long}.`);
  const { verdict } = changes[0];
  byId("verdict").className = `card ${disturbed || verdict === "too-few" ? "unsure" : verdict}`;
  const job = not_the_same_job ? [element("p", { class: "other-job" }, `${not_the_same_job}.`)] : [];
  const paragraphs = lines.map((line) => element("p", {}, line));
  const pages = element("p", { class: "row" }, ...[a, b].map(runLink));
  byId("verdict").replaceChildren(...job, element("h2", {}, response.headline), ...paragraphs, pages);
}

function runLink({ run, attempt }) {
  return element("a", { href: `runs/${encodeURIComponent(run)}?attempt=${attempt}` }, `open ${run}`);
}

function limitPercent({ ratio }) {
  return +(100 * ratio).toFixed(2);
}

function showFindings({ came, went, stayed }, { a, b }) {
  const lists = { [`Only in ${b.run}`]: came, [`Only in ${a.run}`]: went, "In both": stayed };
  const nodes = Object.entries(lists)
    .filter(([, findings]) => findings.length)
    .map(([title, findings]) => findingList(title, findings));
  if (!nodes.length) nodes.push(element("p", { class: "muted" }, "None in either run."));
  byId("findings").replaceChildren(...nodes);
}

function findingList(title, findings) {
  const items = findings.map(({ severity, verdict }) => element("li", {}, severityBadge(severity), ` ${verdict}`));
  return element("div", {}, element("h3", {}, title), element("ul", {}, ...items));
}

function showBuckets(buckets, { heading, compared }) {
  byId("bucket-heading").textContent = heading;
  byId("bucket-noun").textContent = heading.slice(0, -1);
  byId("bucket-card").hidden = buckets.length === 0;
  const moved = buckets.filter(({ verdict }) => verdict === "slower" || verdict === "faster");
  const changed = moved.length ? "Those that changed:" : "No change of one was seen.";
  byId("bucket-note").textContent = `${compared}. ${changed}`;
  byId("buckets").hidden = moved.length === 0;
  const largest = moved.toSorted((x, y) => Math.abs(y.change_ns) - Math.abs(x.change_ns));
  showChanges(byId("buckets"), largest.slice(0, MAX_BUCKETS));
}

function showDifferences(differences) {
  byId("no-difference").hidden = differences.length > 0;
  byId("differences").hidden = differences.length === 0;
  const rows = differences.map(({ title, a, b }) => {
    const values = [a, b].map((value) => element("td", {}, value === null ? "–" : short(value)));
    return element("tr", {}, element("td", {}, title), ...values);
  });
  byId("differences").tBodies[0].replaceChildren(...rows);
}

function isShown(change) {
  return !isOfBucket(change) && (change.a_ns > 0 || change.b_ns > 0 || change.kind === "step");
}

function show(response) {
  const { a, b, changes, limit } = response;
  showVerdict(response);
  showChanges(byId("times"), changes.filter(isShown));
  showBuckets(changes.filter(isOfBucket), response.buckets);
  showFindings(response.findings, response);
  showDifferences(response.differences);
  const options = `--fail-over ${limitPercent(limit)}% --collector ${location.origin}${root}`;
  byId("command").textContent = `ddpobs compare ${a.run} ${b.run} ${options}`;
  document.title = `${a.run} and ${b.run} · ddpobs`;
  byId("response").hidden = false;
}

async function compare() {
  const [a, b, limit] = ["a", "b", "limit"].map((id) => byId(id).value.trim());
  history.replaceState(null, "", `?${new URLSearchParams({ a, b, ...(limit !== DEFAULT_LIMIT && { limit }) })}`);
  byId("response").hidden = true;
  notice("Comparing…");
  const query = new URLSearchParams({ with: b, limit: String(Number(limit) / 100) });
  show(await get(`/runs/${encodeURIComponent(a)}/compare?${query}`));
}

async function suggest() {
  const { runs } = await get(`/runs?limit=${MAX_NAMES}`).catch(() => ({ runs: [] })); // The form works without.
  byId("names").replaceChildren(...runs.map((run) => element("option", { value: run.run })));
}

function compareIfChosen() {
  return byId("a").value && byId("b").value ? runOnce(compare) : null;
}

byId("choice").addEventListener("submit", (event) => {
  event.preventDefault();
  runOnce(compare);
});
byId("swap").addEventListener("click", () => {
  [byId("a").value, byId("b").value] = [byId("b").value, byId("a").value];
  compareIfChosen();
});
const query = new URLSearchParams(location.search);
for (const id of ["a", "b", "limit"]) if (query.has(id)) byId(id).value = query.get(id);
await compareIfChosen();
await suggest();
