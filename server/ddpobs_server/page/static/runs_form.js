// The filters and the order of the list of runs. The address has them, so that a view can be shared.

import { byId, element } from "./elements.js";
import { COLUMNS } from "./runs_columns.js";
import { PAGE_ROWS, state } from "./runs_state.js";

const FILTERS = ["search", "state", "severity", "period"];
const DEFAULT_SORT = "-started";

export function filters() {
  const [text, runState, severity, period] = FILTERS.map((id) => byId(id).value);
  return { text: text.trim(), state: runState, severity, days: Number(period) };
}

// Whether all runs are read: the collector's list has no filter by state or severity, and a single order.
export function needsAll() {
  const { key, down } = state.order;
  return Boolean(byId("state").value) || isByDiagnosis() || key !== "started" || !down;
}

// Whether every run needs a diagnosis, and not only those that are shown.
export function isByDiagnosis() {
  return Boolean(byId("severity").value) || ["finding", "gain", "goodput"].includes(state.order.key);
}

// Show the order in the heads of the table.
export function markOrder() {
  for (const cell of byId("runs").tHead.rows[0].cells) {
    const isKey = cell.dataset.key === state.order.key;
    cell.toggleAttribute("aria-sort", isKey);
    if (isKey) cell.setAttribute("aria-sort", state.order.down ? "descending" : "ascending");
  }
}

function remember() {
  const query = new URLSearchParams();
  for (const id of FILTERS) if (byId(id).value) query.set(id, byId(id).value);
  const text = `${state.order.down ? "-" : ""}${state.order.key}`;
  if (text !== DEFAULT_SORT) query.set("sort", text);
  byId("sort").value = text;
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

function recall() {
  const query = new URLSearchParams(location.search);
  for (const id of FILTERS) byId(id).value = (query.get(id) ?? "").slice(0, byId(id).maxLength);
  sortBy(query.get("sort") ?? DEFAULT_SORT);
}

function sortBy(text) {
  const key = text.replace("-", "");
  if (COLUMNS.some((column) => column.key === key)) state.order = { key, down: text.startsWith("-") };
}

// Fill the form from the address, and follow it: `update` reads and shows the runs.
export function followForm(update) {
  const changed = () => {
    state.shown = PAGE_ROWS;
    remember();
    update();
  };
  buildHeads(changed);
  recall();
  remember();
  for (const id of FILTERS) byId(id).addEventListener("input", changed);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("sort").addEventListener("change", () => {
    sortBy(byId("sort").value);
    changed();
  });
  byId("reset").addEventListener("click", () => {
    for (const id of FILTERS) byId(id).value = "";
    changed();
  });
}

function buildHeads(changed) {
  for (const { key, title, down } of COLUMNS.filter((column) => column.key)) {
    const [first, second] = [down ? "-" : "", down ? "" : "-"];
    byId("sort").append(element("option", { value: first + key }, title));
    byId("sort").append(element("option", { value: second + key }, `${title}, reversed`));
  }
  byId("runs").tHead.rows[0].append(...COLUMNS.map((column) => head(column, changed)));
}

function head({ key, title, number, down }, changed) {
  if (!key) return element("th", {}, element("span", { class: "hidden-text" }, title));
  const button = element("button", { type: "button", class: "sort" }, title);
  button.addEventListener("click", () => {
    state.order = { key, down: state.order.key === key ? !state.order.down : down };
    changed();
  });
  return element("th", { "data-key": key, ...(number && { class: "n" }) }, button);
}
