// What would help: a change chosen by sliders, its predicted step, and the step before and after as bars. The change is
// in the address.

import { get } from "./api.js";
import { byId, element, svg } from "./elements.js";
import { runOnce } from "./refresh.js";
import { address, hasSteps, state } from "./run_state.js";
import { changed, write } from "./selection.js";

const WIDTH = 1000;
const ROW = 34;
const MAX_BUCKETS = 200;
const number = (value) => Number(value.toPrecision(2));
// Each slider's parameter of /whatif, and its value at a position; the first position of the cap leaves it as it is.
const SLIDERS = {
  cap: {
    parameter: "bucket_cap_mb",
    value: (at) => (at < -2 ? null : number(2 ** at)),
    text: (value) => `${value} MB`,
  },
  batches: { parameter: "accumulate", value: (at) => (at === 1 ? null : at), text: (value) => `${value} a step` },
  link: { parameter: "link_factor", value: (at) => (at ? number(2 ** at) : null), text: (value) => `${value} ×` },
};
const asked = { number: 0, attempt: null };

export function followWhatif() {
  const form = byId("whatif-form");
  restore(new URLSearchParams(state.selection.whatif ?? ""));
  form.addEventListener("input", nameValues);
  form.addEventListener("change", () => runOnce(answer));
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("whatif-best").addEventListener("click", () => runOnce(seekBest));
  byId("whatif-reset").addEventListener("click", () => {
    form.reset();
    nameValues();
    runOnce(answer);
  });
}

// Show the answer about this attempt, unless it is shown.
export async function showWhatif() {
  if (!hasSteps()) return;
  if (asked.attempt === state.shownAttempt?.attempt && !isLive()) return;
  asked.attempt = state.shownAttempt?.attempt;
  await answer();
}

const isLive = () => state.details?.state === "running";

// The query that the form holds.
function query() {
  const chosen = new URLSearchParams();
  for (const [id, { parameter, value }] of Object.entries(SLIDERS)) {
    const wanted = value(Number(byId(`whatif-${id}`).value));
    if (wanted !== null) chosen.set(parameter, wanted);
  }
  if (byId("whatif-strategy").value) chosen.set("compression", byId("whatif-strategy").value);
  return chosen;
}

function restore(chosen) {
  const cap = Number(chosen.get("bucket_cap_mb"));
  if (cap > 0) byId("whatif-cap").value = Math.log2(cap);
  if (chosen.get("accumulate")) byId("whatif-batches").value = chosen.get("accumulate");
  const link = Number(chosen.get("link_factor"));
  if (link > 0) byId("whatif-link").value = Math.log2(link);
  byId("whatif-strategy").value = chosen.get("compression") ?? "";
  nameValues();
}

function nameValues() {
  for (const [id, { value, text }] of Object.entries(SLIDERS)) {
    const wanted = value(Number(byId(`whatif-${id}`).value));
    const words = wanted === null ? "as now" : text(wanted);
    byId(`whatif-${id}-value`).textContent = words;
    byId(`whatif-${id}`).setAttribute("aria-valuetext", words);
  }
}

async function seekBest() {
  const chosen = query();
  chosen.set("bucket_cap_mb", "best");
  const { answers } = await get(address("whatif", chosen));
  const caps = answers[0]?.caps_mb ?? [];
  if (caps.length === 1) {
    byId("whatif-cap").value = Math.log2(caps[0]);
    nameValues();
  }
  await answer(chosen);
}

async function answer(chosen = query()) {
  const own = ++asked.number;
  state.selection = changed(state.selection, { whatif: chosen.toString() });
  write(state.selection, true);
  const part = byId("whatif");
  part.ariaBusy = "true";
  try {
    const response = await get(address("whatif", chosen));
    if (own === asked.number) showAnswer(response, chosen.size > 0); // Otherwise the sliders have moved on.
  } finally {
    if (own === asked.number) part.ariaBusy = "false";
  }
}

function showAnswer(response, isChange) {
  const [found] = response.answers;
  byId("whatif").hidden = false;
  byId("whatif-form").hidden = response.now === null;
  byId("whatif-answer").textContent = sentence(response, found, isChange);
  const rows = response.now ? [["now", response.now]] : [];
  if (found?.prediction && isChange) rows.push(["after", found.prediction]);
  byId("whatif-picture").replaceChildren(...picture(rows));
  byId("whatif-legend").hidden = rows.length === 0;
}

function sentence({ now, missing }, found, isChange) {
  if (!now) return `Not known, because ${missing.join("; ")}.`;
  if (!isChange)
    return `A ${unit(now)} takes ${milliseconds(now.step_ns)}. Move a slider to predict it after a change.`;
  if (found.refused) return `${found.change}: not known, because ${found.refused}.`;
  const { step_ns: step, low_ns: low, high_ns: high, words } = found.prediction;
  const range = `(${milliseconds(low)} to ${milliseconds(high)})`;
  return `${found.change}: ${milliseconds(step)} a ${unit(found.prediction)} ${range}; ${words}.`;
}

// What the predicted time is that of.
const unit = ({ batches }) => (batches === 1 ? "step" : "batch");
const whole = ({ step_ns: batch, batches }) => batch * batches;
const milliseconds = (ns) => `${Number((ns / 1e6).toPrecision(3))} ms`;

// A titled bar for each step on one scale.
function picture(rows) {
  const longest = Math.max(...rows.map(([, step]) => Math.max(whole(step), ...step.done_ns)));
  return rows.map(([when, step]) => {
    const count = step.bucket_bytes.length;
    const batches = step.batches === 1 ? "" : ` for ${step.batches} batches`;
    const title = `${when}: ${milliseconds(whole(step))}${batches}, ${count} ${count === 1 ? "bucket" : "buckets"}`;
    return element(
      "figure",
      {},
      element("figcaption", {}, title),
      bar(title, step, (ns) => (WIDTH * ns) / longest),
    );
  });
}

// The computation around the gradients, the gradients, and each transfer below them, as wide as the screen.
function bar(title, step, scale) {
  const end = Math.max(...step.done_ns);
  const before = Math.max(0, whole(step) - end); // The rest of the step is drawn before the reduced gradients.
  const last = Math.max(...step.ready_ns);
  const nodes = [rectangle("other", 0, before, 0), rectangle("backward", before, before + last, 0)];
  for (let bucket = 0; bucket < Math.min(step.bucket_bytes.length, MAX_BUCKETS); bucket++) {
    const [begin, done] = [before + step.begun_ns[bucket], before + step.done_ns[bucket]];
    nodes.push(rectangle("exposed_comm", begin, done, ROW));
  }
  const frame = { viewBox: `0 0 ${WIDTH} ${2 * ROW}`, preserveAspectRatio: "none", role: "img", "aria-label": title };
  return svg("svg", frame, ...nodes);

  function rectangle(part, from, to, y) {
    const width = Math.max(0.5, scale(to - from) - 0.5);
    return svg("rect", { class: `whatif-${part}`, x: scale(from), y, width, height: ROW - 6 });
  }
}

// The parts of the bars, for the form's legend.
export function whatifLegend() {
  const parts = { other: "rest of the step", backward: "gradients", exposed_comm: "transfers" };
  const entries = Object.entries(parts).map(([part, title]) =>
    element("li", {}, element("span", { class: `swatch whatif-${part}` }), title),
  );
  byId("whatif-legend").replaceChildren(...entries);
}
