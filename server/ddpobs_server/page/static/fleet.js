// The fleet: all runs of the workspace over weeks.

import { get } from "./api.js";
import { byId, element, notice } from "./elements.js";
import { runOnce } from "./refresh.js";

const DEFAULT_WEEKS = "12";
const HEADS = ["Runs", "Rank-hours", "Lost", "Goodput", "Largest loss"];
const MIN_SHARE = 0.0005; // A smaller share would be written as 0.0 %.
const MIN_HOURS = 0.0001;
const NAMES = { host: "hosts", tag: "tags", torch: "versions" };

const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;

// Rank-hours as `ddpobs fleet` has them.
function hours(value) {
  if (value > 0 && value < MIN_HOURS) return `under ${MIN_HOURS}`;
  return value < 999.5 ? String(+value.toPrecision(3)) : Math.round(value).toLocaleString("en");
}

const number = (text) => element("td", { class: "n" }, text);

function row(name, sum) {
  const { runs, rank_hours, lost_hours, goodput, causes } = sum;
  const largest = causes.length ? `${causes[0].title} ${percent(causes[0].share)}` : "none";
  const cells = [runs, hours(rank_hours), hours(lost_hours), goodput === null ? "not known" : percent(goodput)];
  return element(
    "tr",
    {},
    element("td", {}, name),
    ...cells.map((cell) => number(String(cell))),
    element("td", {}, largest),
  );
}

function showTable(id, rows) {
  const table = byId(id);
  const heads = HEADS.map((head, index) => element("th", index < 4 ? { class: "n" } : {}, head));
  table.tHead.rows[0].replaceChildren(table.tHead.rows[0].cells[0], ...heads);
  table.tBodies[0].replaceChildren(...rows);
  table.closest("section").hidden = rows.length === 0;
}

const texts = (items) => items.map((text) => element("li", {}, text));

function showSlowHosts({ slow_hosts, compared_runs, false_alarms }) {
  const found = slow_hosts.length ? "These are slow in different jobs" : "No host is slow in different jobs";
  const bound = `The probability of any false name within twelve weeks is at most ${percent(false_alarms)}.`;
  const runs = compared_runs === 1 ? "1 run" : `${compared_runs} runs`;
  const known = `${found}; the hosts of ${runs} were compared. ${bound}`;
  byId("slow-note").textContent = compared_runs ? known : "Not known: no run has several hosts to compare.";
  byId("slow-hosts").replaceChildren(...texts(slow_hosts.map(({ text }) => text)));
}

function show(fleet) {
  const goodput = fleet.goodput === null ? "" : `; goodput ${percent(fleet.goodput)}`;
  const spent = `${hours(fleet.rank_hours)} rank-hours, ${hours(fleet.lost_hours)} of them lost${goodput}`;
  const took = `${fleet.runs} run${fleet.runs === 1 ? "" : "s"} took ${spent}.`;
  byId("summary").textContent = fleet.runs ? took : "No run in these weeks.";
  showSlowHosts(fleet);
  const unknown = fleet.missing.some((text) => text.startsWith("regressions: "));
  byId("no-regression").hidden = unknown || fleet.regressions.length > 0;
  byId("unknown-regression").hidden = !unknown;
  byId("regressions").replaceChildren(...texts(fleet.regressions.map(({ text }) => text)));
  const shown = fleet.causes.filter(({ share }) => share >= MIN_SHARE);
  const causes = shown.map(({ title, hours: lost, share }) =>
    element("tr", {}, element("td", {}, title), number(hours(lost)), number(percent(share, 1))),
  );
  byId("causes").tBodies[0].replaceChildren(...causes);
  byId("causes").closest("section").hidden = causes.length === 0;
  const day = (ns) => new Date(ns / 1e6).toISOString().slice(0, 10);
  showTable(
    "by_week",
    fleet.by_week.map((week) => row(day(week.began_ns), week)),
  );
  for (const kind of Object.keys(NAMES)) {
    showTable(
      `by_${kind}`,
      fleet[`by_${kind}`].map((group) => row(group.name, group)),
    );
  }
  const left = Object.entries(fleet.rows_left_out).filter(([, count]) => count > 0);
  const missing = [...fleet.missing, ...left.map(([kind, count]) => `${count} ${NAMES[kind]} that lose less`)];
  byId("missing").replaceChildren(...texts(missing));
  byId("missing-card").hidden = missing.length === 0;
  byId("response").hidden = false;
}

async function load() {
  const weeks = byId("weeks").value || DEFAULT_WEEKS;
  const tag = byId("tag").value.trim();
  const chosen = new URLSearchParams({ ...(weeks !== DEFAULT_WEEKS && { weeks }), ...(tag && { tag }) });
  history.replaceState(null, "", `?${chosen}`);
  notice("Loading …");
  show(await get(`/fleet?${new URLSearchParams({ weeks, ...(tag && { tag }) })}`));
}

byId("choice").addEventListener("submit", (event) => {
  event.preventDefault();
  runOnce(load);
});
const query = new URLSearchParams(location.search);
for (const id of ["weeks", "tag"]) if (query.has(id)) byId(id).value = query.get(id);
await runOnce(load);
