// The list of runs, newest first.

import { ago, element, get, refresh } from "./api.js";

const table = document.getElementById("runs");
const more = document.getElementById("more");
let cursor = null;

function row(run) {
  const finding = element("td", { class: "muted" }, "…");
  worst(run.run).then((text) => (finding.textContent = text)).catch(() => (finding.textContent = "–"));
  return element("tr", {},
    element("td", {}, element("a", { href: `/runs/${encodeURIComponent(run.run)}` }, run.run)),
    element("td", {}, element("span", { class: `state ${run.state}` }, run.state)),
    element("td", { class: "n" }, `${run.ranks} of ${run.world_size}`),
    element("td", { class: "n" }, String(run.steps)),
    finding,
    element("td", { class: "muted" }, ago(run.last_seen_ns)));
}

async function worst(run) {
  const { findings } = await get(`/runs/${encodeURIComponent(run)}/diagnostics`);
  return findings.length ? findings[0].title : "nothing found";
}

async function show() {
  const page = await get("/runs?limit=30");
  document.getElementById("command").textContent =
    `ddpobs run --collector ${location.origin} -- torchrun --nproc-per-node 8 train.py`;
  document.getElementById("empty").hidden = page.runs.length > 0;
  table.hidden = page.runs.length === 0;
  table.tBodies[0].replaceChildren(...page.runs.map(row));
  cursor = page.next;
  more.hidden = cursor === null;
}

more.addEventListener("click", async () => {
  const page = await get(`/runs?limit=30&cursor=${encodeURIComponent(cursor)}`);
  table.tBodies[0].append(...page.runs.map(row));
  cursor = page.next;
  more.hidden = cursor === null;
});

refresh(show, 15);
