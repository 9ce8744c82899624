// The page of one run. One selection (attempt, steps, rank, step, bucket, finding) is in the address, and all figures follow it.

import { change, element, get, notice, refresh, root, runOnce, saveWithToken, Unreachable } from "./api.js";
import { bucketNames, showAttempts, showBucket, showFacts, showRanks, showRestart, showSettings, showUnused } from "./facts.js";
import { FigureView, onColors } from "./figures.js";
import { showFindings } from "./findings.js";
import { chooseOther, editLabels, labelsOf } from "./labels.js";
import { explainViewer, openTrace } from "./perfetto.js";
import { findingKeys, isEmpty, ofFinding, read, stepRange, write } from "./selection.js";

const LIVE = ["running", "stalled", "hung"], REFRESH_S = { finished: false, lost: 15, failed: 15, interrupted: 15 };
const run = decodeURIComponent(location.pathname.split("/").at(-1)), base = `/runs/${encodeURIComponent(run)}`;
const by = (id) => document.getElementById(id);
let { selection, wrong } = read(location.search);
let details = null, attempts = [], shownAttempt = null, ranks = [], layouts = [], diagnosis = null, keys = [], seen = null, drawing = 0;

by("title").textContent = run;
document.title = `${run} · ddpobs`;
for (const [id, file] of [["trace", "trace.json"], ["open-trace", "trace.json"], ["report", "report.html"]]) saveWithToken(by(id), file);

// The path of a read of the shown attempt.
function address(name, query = "") {
  const all = new URLSearchParams(query);
  if (shownAttempt) all.set("attempt", shownAttempt.attempt);
  else if (selection.attempt && !/^\d{1,9}$/.test(selection.attempt)) all.set("attempt", selection.attempt);
  return `${base}/${name}${all.size ? `?${all}` : ""}`;
}

const views = Object.fromEntries([["account", "account"], ["overview", "overview"], ["phases", "phases"], ["ranks", "ranks"], ["step", "step-figure"], ["buckets", "buckets"]]
  .map(([name, id]) => [name, new FigureView(by(id), name, address)]));

// The query of each figure: only the parts of the selection that it depends on.
function query(name) {
  const parts = {}, range = stepRange(selection);
  if (range && ["phases", "ranks", "step", "buckets"].includes(name)) [parts.from, parts.to] = range;
  if (selection.rank && ["phases", "step"].includes(name)) parts.rank = selection.rank;
  if (selection.step && name === "step") parts.step = selection.step;
  if (selection.match && ["ranks", "step"].includes(name)) parts.match = selection.match;
  if (selection.order && name === "ranks") parts.order = selection.order;
  return parts;
}

// Draw figures one after another, from the top: each takes the collector some time, and the reader begins at the top.
async function draw(isRefresh) {
  if (isRefresh && by("view").ariaBusy === "true") return;
  const follows = isEmpty(selection), own = ++drawing;
  by("view").ariaBusy = "true";
  for (const [name, view] of Object.entries(views)) {
    if (isRefresh && !follows && !["account", "overview"].includes(name)) continue;
    try {
      await view.show(query(name), isRefresh);
    } catch (error) {
      if (own === drawing) by("view").ariaBusy = "false";
      throw error;
    }
    if (own !== drawing) return;  // A later selection draws the rest.
    mark();
  }
  by("view").ariaBusy = "false";
}

function mark() {
  const range = stepRange(selection), step = views.step.data?.shown.step ?? null;
  for (const name of ["overview", "phases", "ranks"]) {
    views[name].mark("selection", name === "overview" && range ? { left: range[0], right: range[1] + 1 } : null);
    views[name].mark("step", step === null ? null : { location: step + 0.5 });
  }
  const rows = views.ranks.data?.shown.ranks ?? [], row = rows.indexOf(Number(selection.rank ?? NaN));
  views.ranks.mark("rank", row < 0 ? null : { top: row - 0.5, bottom: row + 0.5 });
  const labels = views.buckets.named("bars")?.data.label, bar = labels && selection.bucket ? Array.from(labels).indexOf(selection.bucket) : -1;
  views.buckets.mark("bucket", bar < 0 ? null : { left: bar, right: bar + 1 });
  fill();
}

// Show the selection in the form, and what depends on it beside the figures.
function fill() {
  const step = views.step.data?.shown.step;
  for (const name of ["steps", "rank", "bucket", "match"]) if (document.activeElement !== by(name)) by(name).value = selection[name] ?? "";
  by("order").value = selection.order ?? "cost";
  if (document.activeElement !== by("step")) by("step").value = step ?? "";
  const live = details && LIVE.includes(details.state) && (!shownAttempt || shownAttempt.attempt === details.attempt);
  by("clear").hidden = isEmpty(selection);
  by("clear").textContent = live ? "Follow the run" : "Clear the selection";
  const range = stepRange(selection);
  by("trace").href = `${root}/api/v1${address("trace", range && range[1] - range[0] < 50 ? { from: range[0], to: range[1] } : {})}`;
  by("open-trace").href = `${root}/api/v1${address("trace", { from: step ?? 0, to: step ?? 0 })}`;
  by("report").href = `${root}/api/v1${address("report.html")}`;
  showBucket(layouts, selection.bucket);
  const match = selection.match?.toLowerCase() ?? "", drawn = new Set(views.ranks.data?.shown.ranks ?? []);
  showRanks(ranks, ({ rank }) => !match || drawn.has(rank), (rank) => choose({ rank: String(rank) }));
}

// Change the selection: the address, the findings, the figures.
async function choose(change, replace = false) {
  const next = { ...selection, ...change };
  for (const [name, value] of Object.entries(next)) if (!value) delete next[name];
  selection = next;
  write(selection, replace);
  notice("");
  if (diagnosis) showDiagnosis();
  fill();
  await runOnce(() => draw(false));
}

function select(finding, key) {
  const isChosen = selection.finding === key;
  const none = { finding: "", steps: "", rank: "", bucket: "", step: "" };
  return choose(isChosen ? none : { ...none, ...ofFinding(finding, key) });
}

function showDiagnosis() {
  keys = findingKeys(diagnosis.findings);
  showFindings(by("findings"), diagnosis, keys, selection.finding, select);
}

async function show() {
  [details, { attempts }] = await Promise.all([get(base), get(`${base}/attempts`)]);
  shownAttempt = attempts.find((row) => row.attempt === (selection.attempt ?? details.attempt) || String(row.ordinal + 1) === selection.attempt) ?? null;
  if (!shownAttempt && selection.attempt && /^\d{1,9}$/.test(selection.attempt)) throw new Error(`run ${run} has no attempt ${selection.attempt}; it has ${attempts.length}`);
  ({ ranks } = await get(address("ranks")));
  showFacts(details, shownAttempt, attempts, ranks);
  showRestart(attempts, shownAttempt);
  showLabels();
  diagnosis = await get(address("diagnostics"));
  showDiagnosis();
  const isFirst = seen === null, now = `${shownAttempt?.attempt} ${details.last_seen_ns} ${details.steps}`;
  if (isFirst) await begin();
  showAttempts(attempts, shownAttempt, details.attempt);
  showSettings(details);
  if (now !== seen) await draw(!isFirst);
  seen = now;
  fill();
  // Only goodbyes end a run: a stalled run may continue, and a lost, failed or interrupted run may return under its id.
  return shownAttempt?.attempt === details.attempt ? REFRESH_S[details.state] : false;
}

function showLabels() {
  by("edit").hidden = by("compare").hidden = false;
  const fresh = element("span", { class: "labels" }, ...labelsOf(details));
  if (!by("labels").firstElementChild?.isEqualNode(fresh)) by("labels").replaceChildren(fresh);
}

// At the first load: the buckets of the form, and the selection of a link that names only a finding.
async function begin() {
  const [layout, unused] = await Promise.all([get(address("layout")), get(address("unused"))]);
  ({ layouts } = layout);
  showUnused(unused);
  by("bucket").replaceChildren(element("option", { value: "" }, "–"), ...bucketNames(layouts).map((name) => element("option", { value: name }, name)));
  const index = keys.indexOf(selection.finding);
  if (index >= 0 && !selection.steps && !selection.rank && !selection.step) {
    Object.assign(selection, ofFinding(diagnosis.findings[index], selection.finding));
    write(selection, true);
  }
  by("wrong").hidden = wrong.length === 0;
  by("wrong").textContent = `The address has a malformed ${wrong.join(", ")}, which is left out.`;
}

// With many ranks a part of the rows is seen at a time.
views.ranks.onDrawn = () => {
  const { ranks: rows, window } = views.ranks.data.shown, parts = Math.ceil(rows.length / window);
  by("rows").parentElement.hidden = parts < 2;
  by("rows").replaceChildren(...Array.from({ length: parts }, (_, part) => element("option", { value: part }, `${part * window + 1} to ${Math.min((part + 1) * window, rows.length)} of ${rows.length}`)), element("option", { value: "all" }, "all"));
};
by("rows").addEventListener("change", ({ target: { value } }) => {
  const { ranks: rows, window } = views.ranks.data.shown, first = value === "all" ? 0 : Number(value) * window;
  const last = value === "all" ? rows.length : Math.min(first + window, rows.length);
  views.ranks.model.y_range.setv({ start: last - 0.5, end: first - 0.5 });
});

// Step under a position of a figure over steps.
const stepAt = (x) => String(Math.max(0, Math.floor(x)));

for (const name of ["overview", "phases", "ranks"]) {
  views[name].onSelect = (x0, x1) => x1 - x0 >= 1 && choose({ steps: `${stepAt(x0)}-${stepAt(x1)}`, finding: "" });
  views[name].onPoint = (x) => {
    for (const other of ["overview", "phases", "ranks"]) if (other !== name) views[other].mark("pointer", x === null ? null : { location: x });
  };
}
views.overview.onTap = (x, y) => {
  const { data } = views.overview.named("findings");
  const hit = Array.from(data.from).findIndex((from, index) => from <= x && x <= data.right[index] && data.lane_bottom[index] <= y && y <= data.lane_top[index]);
  const finding = hit < 0 ? null : data.finding[hit];
  return finding !== null && diagnosis.findings[finding] ? select(diagnosis.findings[finding], keys[finding]) : choose({ step: stepAt(x) });
};
views.phases.onTap = (x) => choose({ step: stepAt(x) });
views.ranks.onTap = (x, y) => choose({ step: stepAt(x), rank: String(views.ranks.data.shown.ranks[Math.round(y)] ?? "") });
views.step.onTap = (x, y) => {
  const rank = views.step.data.shown.ranks[Math.floor(y)];
  for (const name of ["moving", "waiting", "compute"]) {
    const data = views.step.named(name)?.data;
    const hit = data ? Array.from(data.left).findIndex((left, index) => left <= x && x <= data.right[index] && data.top[index] <= y && y <= data.bottom[index]) : -1;
    if (hit >= 0) return choose({ rank: String(rank), bucket: String(data.bucket[hit]), step: String(views.step.data.shown.step) });
  }
  return rank === undefined ? null : choose({ rank: String(rank), step: String(views.step.data.shown.step) });
};
views.buckets.onTap = (x) => {
  const label = views.buckets.named("bars").data.label[Math.floor(x)];
  return label !== undefined && choose({ bucket: String(label) });
};

by("selection").addEventListener("submit", (event) => {
  event.preventDefault();
  const steps = by("steps").value.trim();
  const step = by("step").value === String(views.step.data?.shown.step) ? selection.step ?? "" : by("step").value;
  choose({ steps: steps.replaceAll(" ", ""), rank: by("rank").value, step, bucket: by("bucket").value, finding: selection.steps === steps ? selection.finding : "" });
});
by("bucket").addEventListener("change", () => choose({ bucket: by("bucket").value }));
by("clear").addEventListener("click", () => choose({ steps: "", rank: "", step: "", bucket: "", finding: "" }));
by("match").addEventListener("change", () => choose({ match: by("match").value.trim() }, true));
by("order").addEventListener("change", () => choose({ order: by("order").value }, true));
for (const [id, by_] of [["previous", -1], ["next", 1]]) {
  by(id).addEventListener("click", () => choose({ step: String(Math.max(0, (views.step.data?.shown.step ?? 0) + by_)) }));
}
by("edit").addEventListener("click", () => editLabels(details, async (labels) => {
  Object.assign(details, await change("PATCH", base, labels, "ingest"));
  showLabels();
}));
by("compare").addEventListener("click", () => runOnce(async () => {
  const { runs } = await get("/runs?limit=500");
  chooseOther(runs.find((known) => known.run === run) ?? { run, tags: [], created_ns: Infinity }, runs, (other) => {
    location.href = `../compare?${new URLSearchParams({ a: other, b: run })}`;
  });
}));
by("perfetto").addEventListener("click", () => {
  if (by("perfetto").dataset.installed === "no") return explainViewer(by("open-trace"));
  const step = views.step.data?.shown.step ?? 0;
  return runOnce(() => openTrace(address("trace", { from: step, to: step }), `${run}: step ${step}`));
});
by("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(location.href);
  by("copy").textContent = "copied";
  setTimeout(() => (by("copy").textContent = "copy link"), 2000);
});
addEventListener("popstate", () => {
  ({ selection, wrong } = read(location.search));
  seen = null;
  runOnce(show);
});
onColors(() => runOnce(() => draw(false)));

refresh(async () => {
  try {
    const wait = await show();
    by("state").hidden = true;
    by("view").hidden = false;
    return wait;
  } catch (error) {
    if (!(error instanceof Unreachable) && details === null) {
      by("view").hidden = true;
      by("state").hidden = false;
    }
    throw error;
  }
}, 5);
