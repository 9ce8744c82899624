// The list of runs, newest first.

import { ago, element, get, refresh, root, runOnce, saveWithToken } from "./api.js";

const PAGE = 30, MAX_LIMIT = 500;
const table = document.getElementById("runs");
const more = document.getElementById("more");
let shown = PAGE, undiagnosed = [];

function row(run) {
  const finding = element("td", { class: "muted" }, run.diagnosis ? worst(run, run.diagnosis.worst, run.diagnosis.missing) : "…");
  if (!run.diagnosis?.current) undiagnosed.push([run, finding]);
  return element("tr", {},
    element("td", {}, element("a", { href: `${root}/runs/${encodeURIComponent(run.run)}` }, run.run)),
    element("td", {}, element("span", { class: `state ${run.state}` }, run.state)),
    element("td", { class: "n" }, `${run.ranks} of ${run.world_size}`),
    element("td", { class: "n" }, String(run.steps)),
    finding,
    element("td", { class: "muted" }, ago(run.last_seen_ns)));
}

function worst(run, title, missing) {
  const nothing = missing ? `nothing found, ${missing} not judged` : "nothing found";
  return title ?? (run.steps ? nothing : "not judged yet");
}

// Request the missing diagnoses one after the other.
async function diagnose() {
  const queue = undiagnosed;
  while (queue === undiagnosed && queue.length) {
    const [run, cell] = queue.shift();
    try {
      const { findings, missing } = await get(`/runs/${encodeURIComponent(run.run)}/diagnostics`);
      cell.textContent = worst(run, findings[0]?.title, missing.length);
    } catch {
      cell.textContent = "–";
    }
  }
}

async function newest(count) {
  let runs = [], next = null;
  do {
    const from = next === null ? "" : `&cursor=${encodeURIComponent(next)}`;
    const page = await get(`/runs?limit=${Math.min(MAX_LIMIT, count - runs.length)}${from}`);
    runs = [...runs, ...page.runs];
    next = page.next;
  } while (next !== null && runs.length < count);
  return { runs, next };
}

async function show(count = shown) {
  const { runs, next } = await newest(count);
  if (count < shown) return;  // A request for more runs was served meanwhile.
  shown = count;
  document.getElementById("command").textContent =
    `ddpobs run --collector ${location.origin} -- torchrun --nproc-per-node 8 train.py`;
  document.getElementById("empty").hidden = runs.length > 0;
  table.hidden = runs.length === 0;
  undiagnosed = [];
  table.tBodies[0].replaceChildren(...runs.map(row));
  more.hidden = next === null;
  diagnose();
}

more.addEventListener("click", async () => {
  more.disabled = true;
  await runOnce(() => show(shown + PAGE));
  more.disabled = false;
});

saveWithToken(document.getElementById("metrics"), "metrics.txt");
refresh(show, 15);
