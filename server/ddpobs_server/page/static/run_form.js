// The form with the selection, and the buttons and links of the run's page.

import { change, get, root, saveWithToken } from "./api.js";
import { byId, element, renew } from "./elements.js";
import { capital, showBucket, showRanks } from "./facts.js";
import { chooseOther, editLabels, labelsOf } from "./labels.js";
import { runOnce } from "./refresh.js";
import { shown } from "./run_figures.js";
import { address, isLive, state } from "./run_state.js";
import { isEmpty, markedRanks, stepRange } from "./selection.js";
import { offerTrace } from "./trace.js";

const MAX_TRACE_STEPS = 50;
const COPIED_MS = 2000;
const filled = { ranks: null, key: null }; // What the table of ranks shows.

// Show the selection in the form, and what depends on it beside the figures.
export function fillForm(choose) {
  const { selection } = state;
  const { step } = shown("step");
  const values = {
    steps: selection.steps,
    rank: selection.rank,
    bucket: selection.bucket,
    match: selection.match,
    step,
  };
  for (const [id, value] of Object.entries(values)) {
    if (document.activeElement !== byId(id)) byId(id).value = value ?? "";
  }
  byId("order").value = selection.order ?? "cost";
  byId("order").parentElement.hidden = (shown("ranks").compared ?? 0) < 2;
  byId("previous").parentElement.hidden = (state.shownAttempt ?? state.details)?.steps === 1;
  byId("clear").hidden = isEmpty(selection);
  byId("clear").textContent = isLive() ? "Follow the run" : "Clear";
  byId("report").href = `${root}/api/v1${address("report.html")}`;
  showBucket(state.layouts, selection.bucket);
  fillRanks((rank) => choose({ rank: String(rank) }));
}

// Fill the table of ranks, unless it has these rows: those of a thousand ranks take as long as a figure.
function fillRanks(select) {
  const { selection, ranks } = state;
  const drawn = selection.match ? (shown("ranks").ranks ?? []) : null;
  const marked = markedRanks(selection, state.diagnosis?.findings ?? [], state.keys, ranks.length);
  const key = JSON.stringify([drawn, marked]);
  if (filled.ranks === ranks && filled.key === key) return;
  Object.assign(filled, { ranks, key });
  const isShown = new Set(drawn);
  showRanks(drawn ? ranks.filter(({ rank }) => isShown.has(rank)) : ranks, marked, state.layouts, select);
}

export function offerBuckets(titles, noun = "bucket") {
  const options = titles.map(([name, title]) => element("option", { value: name }, title));
  byId("bucket-noun").textContent = capital(noun);
  byId("bucket").replaceChildren(element("option", { value: "" }, "–"), ...options);
}

export function showLabels() {
  byId("edit").hidden = byId("compare").hidden = false;
  renew(byId("labels"), element("span", { class: "labels" }, ...labelsOf(state.details)));
}

// Name the parts of the address that are left out.
export function showWrong() {
  byId("wrong").hidden = state.wrong.length === 0;
  byId("wrong").textContent = `The address has a malformed ${state.wrong.join(", ")}, which is left out.`;
}

export function followForm(choose) {
  byId("selection").addEventListener("submit", (event) => {
    event.preventDefault();
    choose(entered());
  });
  byId("bucket").addEventListener("change", () => choose({ bucket: byId("bucket").value }));
  const nothing = { steps: "", rank: "", step: "", bucket: "", finding: "" };
  byId("clear").addEventListener("click", () => choose(nothing));
  byId("match").addEventListener("change", () => choose({ match: byId("match").value.trim() }, true));
  byId("order").addEventListener("change", () => choose({ order: byId("order").value }, true));
  const move = (steps) => () => choose({ step: String(Math.max(0, (shown("step").step ?? 0) + steps)) });
  byId("previous").addEventListener("click", move(-1));
  byId("next").addEventListener("click", move(1));
}

// The selection that the form holds. A step that the figure chose is no selection.
function entered() {
  const { selection } = state;
  const steps = byId("steps").value.trim();
  const step = byId("step").value === String(shown("step").step) ? (selection.step ?? "") : byId("step").value;
  return {
    steps: steps.replaceAll(" ", ""),
    rank: byId("rank").value,
    step,
    bucket: byId("bucket").value,
    finding: selection.steps === steps ? selection.finding : "",
  };
}

export function followButtons() {
  saveWithToken(byId("report"), "report.html");
  byId("edit").addEventListener("click", () => editLabels(state.details, saveLabels));
  byId("compare").addEventListener("click", () => runOnce(compare));
  byId("trace").addEventListener("click", showTrace);
  byId("copy").addEventListener("click", copyLink);
}

async function saveLabels(labels) {
  Object.assign(state.details, await change("PATCH", state.base, labels, "ingest"));
  showLabels();
}

async function compare() {
  const { runs } = await get("/runs?limit=500");
  const own = runs.find((known) => known.run === state.run) ?? { run: state.run, tags: [], created_ns: Infinity };
  chooseOther(own, runs, (other) => {
    location.href = `../compare?${new URLSearchParams({ a: other, b: state.run })}`;
  });
}

// The selected steps, if they are few; otherwise the drawn step.
function showTrace() {
  const range = stepRange(state.selection);
  const step = shown("step").step ?? 0;
  const steps = range && range[1] - range[0] < MAX_TRACE_STEPS ? range : [step, step];
  offerTrace(steps, address, state.run, byId("trace").dataset.viewer === "yes");
}

async function copyLink() {
  await navigator.clipboard.writeText(location.href);
  byId("copy").textContent = "copied";
  setTimeout(() => (byId("copy").textContent = "copy link"), COPIED_MS);
}
