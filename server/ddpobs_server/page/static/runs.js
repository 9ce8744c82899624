// The list of runs: keeps them up to date, and shows those that match.

import { change, root, saveWithToken } from "./api.js";
import { byId } from "./elements.js";
import { importFiles } from "./import.js";
import { confirmDelete, editLabels } from "./labels.js";
import { refresh, runOnce } from "./refresh.js";
import { rove } from "./roving.js";
import { CONTROLS, ROW_CONTROLS, RunRow } from "./run_row.js";
import { matches, sorted } from "./runs_columns.js";
import { filters, followForm, isByDiagnosis, markOrder, needsAll } from "./runs_form.js";
import { diagnose, hasAll, PAGE_ROWS, readRuns, state } from "./runs_state.js";

const EVERY_S = 3;
const rows = new Map(); // By name.
const reading = { isAgain: false, done: null }; // The reads that go on.

// Read the runs that the form asks for, and show them. A call during a read begins another one after it.
function update() {
  if (hasAll(filters())) render();
  reading.isAgain = true;
  reading.done ??= readAndShow().finally(() => (reading.done = null));
  return reading.done;
}

async function readAndShow() {
  while (reading.isAgain) {
    reading.isAgain = false;
    await readRuns(filters(), needsAll());
  }
  render();
}

function render() {
  const wanted = filters();
  const all = [...state.runs.values()];
  const found = sorted(
    all.filter((run) => matches(run, wanted)),
    state.order,
  );
  const page = found.slice(0, state.shown);
  showRows(page);
  markOrder();
  const count = needsAll() ? found.length : state.matches;
  showParts(count);
  const judged = isByDiagnosis() ? all.filter((run) => matches(run, { ...wanted, severity: "" })) : page;
  showCount(count, judged);
  showSelection();
  diagnose(judged, showDiagnosed);
}

function showRows(page) {
  for (const [name, row] of rows) if (!state.runs.has(name)) forget(name, row);
  const nodes = page.map((run) => {
    if (!rows.has(run.run)) rows.set(run.run, new RunRow(select, edit));
    rows.get(run.run).show(run, state.selected.has(run.run));
    return rows.get(run.run).node;
  });
  const body = byId("runs").tBodies[0];
  const isSame = nodes.length === body.rows.length && nodes.every((node, index) => node === body.rows[index]);
  if (!isSame) body.replaceChildren(...nodes);
  if (page.length && !body.querySelector("[tabindex='0']")) rows.get(page[0].run).link.tabIndex = 0;
}

function forget(name, row) {
  row.node.remove();
  rows.delete(name);
}

function showParts(found) {
  const isEmpty = state.total === 0;
  byId("loading").hidden = true;
  byId("empty").hidden = !isEmpty;
  byId("filters").hidden = byId("count").hidden = isEmpty;
  byId("runs").hidden = found === 0;
  byId("none").hidden = isEmpty || found > 0;
  byId("more").hidden = found <= state.shown;
}

function showCount(found, judged) {
  const all = state.total;
  const missing = judged.filter((run) => !run.diagnosis).length;
  const text = found === all ? `${all} runs` : `${found} of ${all} runs`;
  byId("count").textContent = isByDiagnosis() && missing ? `${text}, ${missing} not judged yet` : text;
}

function showDiagnosed(run) {
  if (isByDiagnosis()) render();
  else rows.get(run.run)?.show(run, state.selected.has(run.run));
}

function select(name, isSelected) {
  if (isSelected) state.selected.set(name, state.runs.get(name));
  else state.selected.delete(name);
  showSelection();
}

function showSelection() {
  const { size } = state.selected;
  byId("compare").disabled = size !== 2;
  byId("compare").textContent = size ? `Compare (${size} of 2)` : "Compare two";
  byId("delete").disabled = size === 0;
  byId("delete").textContent = size ? `Delete (${size})` : "Delete";
}

function edit(run) {
  editLabels(run, async (labels) => {
    const saved = await change("PATCH", `/runs/${encodeURIComponent(run.run)}`, labels, "ingest");
    Object.assign(state.runs.get(run.run) ?? {}, saved);
    render();
  });
}

async function showMore() {
  byId("more").disabled = true; // A second click in the same moment adds nothing.
  state.shown += PAGE_ROWS;
  await runOnce(update);
  byId("more").disabled = false;
}

function compare() {
  const [a, b] = [...state.selected.values()].sort((x, y) => x.created_ns - y.created_ns).map(({ run }) => run);
  location.href = `compare?${new URLSearchParams({ a, b })}`;
}

function remove() {
  confirmDelete([...state.selected.keys()], async (name) => {
    state.selected.delete(name); // Also if somebody else has deleted the run.
    await change("DELETE", `/runs/${encodeURIComponent(name)}`, null, "admin");
    state.runs.delete(name);
    await runOnce(update);
  });
}

byId("command").textContent =
  `ddpobs run --collector ${location.origin}${root} -- torchrun --nproc-per-node 8 train.py`;
followForm(() => runOnce(update));
byId("more").addEventListener("click", showMore);
byId("import").addEventListener("click", importFiles);
byId("compare").addEventListener("click", compare);
byId("delete").addEventListener("click", remove);
saveWithToken(byId("metrics"), "metrics.txt");
rove(byId("runs").tHead, "button");
rove(byId("runs").tBodies[0], CONTROLS, undefined, ROW_CONTROLS);
refresh(update, EVERY_S);
