// The list of runs, newest first.

import { ago, element, get, refresh, saveWithToken } from "./api.js";

const table = document.getElementById("runs");
const more = document.getElementById("more");
let cursor = null, unsure = [];

function row(run) {
  const finding = element("td", { class: "muted" }, run.diagnosis ? worst(run.diagnosis.worst) : "…");
  if (!run.diagnosis?.current) unsure.push([run.run, finding]);
  return element("tr", {},
    element("td", {}, element("a", { href: `/runs/${encodeURIComponent(run.run)}` }, run.run)),
    element("td", {}, element("span", { class: `state ${run.state}` }, run.state)),
    element("td", { class: "n" }, `${run.ranks} of ${run.world_size}`),
    element("td", { class: "n" }, String(run.steps)),
    finding,
    element("td", { class: "muted" }, ago(run.last_seen_ns)));
}

function worst(title) {
  return title ?? "nothing found";
}

// Diagnoses that the list does not know yet are asked for one after the other.
async function diagnose() {
  const asked = unsure;
  while (asked === unsure && asked.length) {
    const [run, place] = asked.shift();
    try {
      const { findings } = await get(`/runs/${encodeURIComponent(run)}/diagnostics`);
      place.textContent = worst(findings[0]?.title);
    } catch {
      place.textContent = "–";
    }
  }
}

async function show() {
  const page = await get("/runs?limit=30");
  document.getElementById("command").textContent =
    `ddpobs run --collector ${location.origin} -- torchrun --nproc-per-node 8 train.py`;
  document.getElementById("empty").hidden = page.runs.length > 0;
  table.hidden = page.runs.length === 0;
  unsure = [];
  table.tBodies[0].replaceChildren(...page.runs.map(row));
  cursor = page.next;
  more.hidden = cursor === null;
  diagnose();
}

more.addEventListener("click", async () => {
  const page = await get(`/runs?limit=30&cursor=${encodeURIComponent(cursor)}`);
  unsure = [...unsure];
  table.tBodies[0].append(...page.runs.map(row));
  cursor = page.next;
  more.hidden = cursor === null;
  diagnose();
});

saveWithToken(document.getElementById("metrics"), "metrics.txt");
refresh(show, 15);
