// The list of runs: loads them, keeps them up to date, and shows those that match.

import { change, element, get, notice, now, refresh, runOnce, saveWithToken } from "./api.js";
import { confirmDelete, editLabels } from "./labels.js";
import { COLUMNS, matches, RunRow, value } from "./run_rows.js";

const PAGE = 30, LIMIT = 500, MOST = 5000, EVERY_S = 3;
const RECENT_NS = 300e9;  // Runs seen in this time before the newest batch are read again: their state may change.
const WHOLE_EVERY = 20;  // Refreshes until all runs are read again: some may have been deleted.
const DIAGNOSE_MS = 15_000;  // Least time between two requests for the diagnosis of one run.
const by = (id) => document.getElementById(id);
const runs = new Map(), rows = new Map(), selected = new Set(), asked = new Map();
let shown = PAGE, refreshes = 0, order = { key: "started", down: true }, queue = [], isDiagnosing = false;

function filters() {
  return { text: by("search").value.trim().toLowerCase(), state: by("state").value, severity: by("severity").value, days: Number(by("period").value) };
}

function sorted(found) {
  const sign = order.down ? -1 : 1;
  const key = (run) => value(run, order.key);
  // Unknown values are last in both directions; equal ones are newest first.
  return found.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null) || b.created_ns - a.created_ns;
    return (x < y ? -sign : x > y ? sign : 0) || b.created_ns - a.created_ns;
  });
}

// Whether every run needs a diagnosis, and not only those that are shown.
function isByDiagnosis() {
  return Boolean(by("severity").value) || ["finding", "gain", "goodput"].includes(order.key);
}

function render() {
  const wanted = filters(), all = [...runs.values()];
  const found = sorted(all.filter((run) => matches(run, wanted, now())));
  const page = found.slice(0, shown);
  for (const [name, row] of rows) if (!runs.has(name)) row.node.remove(), rows.delete(name), selected.delete(name);
  const nodes = page.map((run) => {
    if (!rows.has(run.run)) rows.set(run.run, new RunRow(select, edit));
    rows.get(run.run).show(run, selected.has(run.run));
    return rows.get(run.run).node;
  });
  const body = by("runs").tBodies[0];
  if (nodes.length !== body.rows.length || nodes.some((node, index) => node !== body.rows[index])) body.replaceChildren(...nodes);
  for (const cell of by("runs").tHead.rows[0].cells) {
    const isKey = cell.dataset.key === order.key;
    cell.toggleAttribute("aria-sort", isKey);
    if (isKey) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
  }
  by("loading").hidden = true;
  by("empty").hidden = runs.size > 0;
  by("filters").hidden = by("count").hidden = runs.size === 0;
  by("runs").hidden = found.length === 0;
  by("none").hidden = !runs.size || found.length > 0;
  by("more").hidden = found.length <= shown;
  const judged = isByDiagnosis() ? all.filter((run) => matches(run, { ...wanted, severity: "" }, now())) : page;
  const missing = judged.filter((run) => !run.diagnosis).length;
  by("count").textContent = (found.length === runs.size ? `${runs.size} runs` : `${found.length} of ${runs.size} runs`) + (isByDiagnosis() && missing ? `, ${missing} not judged yet` : "");
  showSelection();
  diagnose(judged);
}

function select(name, isSelected) {
  if (isSelected) selected.add(name);
  else selected.delete(name);
  showSelection();
}

function showSelection() {
  by("compare").disabled = selected.size !== 2;
  by("compare").textContent = selected.size ? `Compare (${selected.size} of 2)` : "Compare two";
  by("delete").disabled = selected.size === 0;
  by("delete").textContent = selected.size ? `Delete (${selected.size})` : "Delete";
}

// Request the missing diagnoses one after the other.
async function diagnose(wanted) {
  const time = Date.now();
  queue = wanted.filter((run) => !run.diagnosis?.current && !(time - asked.get(run.run) < DIAGNOSE_MS));
  if (isDiagnosing) return;  // The loop goes on with the new queue.
  isDiagnosing = true;
  while (queue.length) {
    const { run } = queue.shift();
    asked.set(run, Date.now());
    const answer = await get(`/runs/${encodeURIComponent(run)}/diagnostics`).catch(() => null);
    const known = runs.get(run);
    if (!answer || !known) continue;
    const { title = null, severity = null, code = null, gain = null } = answer.findings[0] ?? {};
    known.diagnosis = { worst: title, severity, code, gain, goodput: answer.goodput, findings: answer.findings.length, missing: answer.missing.length, current: true };
    if (isByDiagnosis()) render();
    else rows.get(run)?.show(known, selected.has(run));
  }
  isDiagnosing = false;
}

async function read(query) {
  const found = [];
  let next = null;
  do {
    const from = next === null ? "" : `&cursor=${encodeURIComponent(next)}`;
    const page = await get(`/runs?limit=${LIMIT}${query}${from}`);
    found.push(...page.runs);
    next = page.next;
  } while (next !== null && found.length < MOST);
  return found;
}

async function load() {
  const isWhole = refreshes++ % WHOLE_EVERY === 0 || !runs.size;
  const newest_ns = Math.max(0, ...[...runs.values()].map((run) => run.last_seen_ns));
  const found = await read(isWhole ? "" : `&seen_after_ns=${Math.max(0, newest_ns - RECENT_NS)}`);
  const former = new Map(runs);
  if (isWhole) runs.clear();
  for (const run of found) {
    const known = former.get(run.run)?.diagnosis;
    if (run.diagnosis === null && known) run.diagnosis = { ...known, current: false };
    runs.set(run.run, run);
  }
  render();
}

function edit(run) {
  editLabels(run, async (labels) => {
    Object.assign(runs.get(run.run) ?? {}, await change("PATCH", `/runs/${encodeURIComponent(run.run)}`, labels, "ingest"));
    render();
  });
}

// The address has the filters and the order, so that a view can be shared.
function remember() {
  const query = new URLSearchParams();
  for (const id of ["search", "state", "severity", "period"]) if (by(id).value) query.set(id, by(id).value);
  const text = `${order.down ? "-" : ""}${order.key}`;
  if (text !== "-started") query.set("sort", text);
  by("sort").value = text;
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

function recall() {
  const query = new URLSearchParams(location.search);
  for (const id of ["search", "state", "severity", "period"]) by(id).value = query.get(id) ?? "";
  sortBy(query.get("sort") ?? "-started");
}

function sortBy(text) {
  const key = text.replace("-", "");
  if (COLUMNS.some((column) => column.key === key)) order = { key, down: text.startsWith("-") };
}

function changed() {
  shown = PAGE;
  remember();
  render();
}

function build() {
  by("command").textContent = `ddpobs run --collector ${location.origin} -- torchrun --nproc-per-node 8 train.py`;
  const heads = COLUMNS.map(({ key, title, number, down }) => {
    const head = element("th", { ...(key && { "data-key": key }), ...(number && { class: "n" }) });
    if (!key) return fillHead(head, title);
    const button = element("button", { type: "button", class: "sort" }, title);
    button.addEventListener("click", () => {
      order = order.key === key ? { key, down: !order.down } : { key, down };
      changed();
    });
    head.append(button);
    by("sort").append(element("option", { value: `${down ? "-" : ""}${key}` }, title), element("option", { value: `${down ? "" : "-"}${key}` }, `${title}, reversed`));
    return head;
  });
  by("runs").tHead.rows[0].append(...heads);
}

function fillHead(head, title) {
  head.append(element("span", { class: "hidden-text" }, title));
  return head;
}

build();
recall();
remember();
for (const id of ["search", "state", "severity", "period"]) by(id).addEventListener("input", changed);
by("filters").addEventListener("submit", (event) => event.preventDefault());
by("sort").addEventListener("change", () => (sortBy(by("sort").value), changed()));
by("reset").addEventListener("click", () => {
  for (const id of ["search", "state", "severity", "period"]) by(id).value = "";
  changed();
});
by("more").addEventListener("click", () => {
  by("more").disabled = true;  // A second click in the same moment adds nothing.
  shown += PAGE;
  render();
  requestAnimationFrame(() => (by("more").disabled = false));
});
by("compare").addEventListener("click", () => {
  const [a, b] = [...selected].sort((x, y) => runs.get(x).created_ns - runs.get(y).created_ns);
  location.href = `compare?${new URLSearchParams({ a, b })}`;
});
by("delete").addEventListener("click", () => {
  confirmDelete([...selected], async (name) => {
    await change("DELETE", `/runs/${encodeURIComponent(name)}`, null, "admin");
    runs.delete(name);
    render();
  });
});
saveWithToken(by("metrics"), "metrics.txt");
refresh(load, EVERY_S);
