// The page of one run. One selection (attempt, steps, rank, step, bucket, finding) is in the address, and all figures
// follow it.

import { get, Unreachable } from "./api.js";
import { byId, notice } from "./elements.js";
import { bucketTitles, showAttempts, showFacts, showRestart, showSettings, showUnused } from "./facts.js";
import { followFigures } from "./figure_events.js";
import { onColors } from "./figure_view.js";
import { showFindings } from "./finding_cards.js";
import { refresh, runOnce } from "./refresh.js";
import { rove } from "./roving.js";
import { buildFigures, drawFigures, markSelection } from "./run_figures.js";
import { fillForm, followButtons, followForm, offerBuckets, showLabels, showWrong } from "./run_form.js";
import { address, hasSteps, isLive, isOrdinal, selectedAttempt, state } from "./run_state.js";
import { followWhatif, showWhatif, whatifLegend } from "./whatif.js";
import { changed, findingKeys, ofFinding, read, write } from "./selection.js";

const LIVE_REFRESH_S = 5;
// Only goodbyes end a run: a stalled run may continue, and a lost, failed or interrupted run may return under its id.
const REFRESH_S = { finished: false, lost: 15, failed: 15, interrupted: 15 };

function draw(isRefresh) {
  const showSelection = () => {
    markSelection();
    fillForm(choose);
  };
  return drawFigures(showSelection, isRefresh);
}

// Change the selection: the address, the findings, the figures.
async function choose(change, replace = false) {
  state.selection = changed(state.selection, change);
  write(state.selection, replace);
  notice("");
  if (state.diagnosis) showDiagnosis();
  fillForm(choose);
  await runOnce(() => draw(false));
}

// Select a finding; if it is selected, nothing.
function select(finding, key) {
  const isChosen = state.selection.finding === key;
  const none = { finding: "", steps: "", rank: "", bucket: "", step: "" };
  return choose(isChosen ? none : { ...none, ...ofFinding(finding, key) });
}

function showDiagnosis() {
  state.keys = findingKeys(state.diagnosis.findings);
  showFindings(byId("findings"), state.diagnosis, state.keys, state.selection.finding, select);
}

async function readRun() {
  const [details, { attempts }] = await Promise.all([get(state.base), get(`${state.base}/attempts`)]);
  const shownAttempt = selectedAttempt(attempts, details.attempt);
  Object.assign(state, { details, attempts, shownAttempt });
  const { attempt } = state.selection;
  if (!shownAttempt && attempt && isOrdinal(attempt)) {
    throw new Error(`run ${state.run} has no attempt ${attempt}; it has ${attempts.length}`);
  }
}

// Show the present state of the run; return the seconds until the next look, or false after its end.
async function show() {
  // The diagnosis takes longest: it is requested first, and an error is thrown where its result is needed.
  const ofLatest = state.selection.attempt ? null : get(`${state.base}/diagnostics`);
  ofLatest?.catch(() => null);
  await readRun();
  const { details, shownAttempt, attempts } = state;
  const diagnosis = ofLatest ?? get(address("diagnostics"));
  if (state.seen === null) state.building ??= build();
  for (const begun of [diagnosis, state.building]) begun?.catch(() => null);
  ({ ranks: state.ranks } = await get(address("ranks")));
  showFacts(details, shownAttempt, attempts, state.ranks);
  byId("view").classList.toggle("no-steps", !hasSteps());
  showLabels();
  state.diagnosis = await diagnosis;
  showRestart(attempts, shownAttempt, state.diagnosis.findings);
  showDiagnosis();
  const isFirst = state.seen === null;
  const now = `${shownAttempt?.attempt} ${details.last_seen_ns} ${details.steps}`;
  if (isFirst) await begin();
  showAttempts(attempts, shownAttempt, details.attempt);
  showSettings(details);
  if (now !== state.seen) await draw(!isFirst);
  if (now !== state.seen) await showWhatif();
  state.seen = now;
  fillForm(choose);
  return untilNext();
}

function untilNext() {
  const { details, shownAttempt } = state;
  if (shownAttempt?.attempt !== details.attempt) return false;
  return isLive() ? LIVE_REFRESH_S : (REFRESH_S[details.state] ?? false);
}

// At the first load: the figures, the buckets of the form, and the selection of a link that names only a finding.
async function begin() {
  state.building ??= build();
  const [{ layouts }, unused] = await Promise.all([get(address("layout")), get(address("unused")), state.building]);
  state.layouts = layouts;
  showUnused(unused);
  offerBuckets(bucketTitles(layouts), layouts[0]?.noun);
  const { selection, diagnosis, keys } = state;
  const finding = diagnosis.findings[keys.indexOf(selection.finding)];
  if (finding && !selection.steps && !selection.rank && !selection.step) {
    state.selection = changed(selection, ofFinding(finding, selection.finding));
    write(state.selection, true);
  }
  showWrong();
}

async function build() {
  try {
    await buildFigures();
    followFigures(choose, select);
  } catch (error) {
    state.building = null;
    throw error;
  }
}

async function showOrExplain() {
  try {
    const wait_s = await show();
    byId("state").hidden = true;
    byId("view").hidden = false;
    return wait_s;
  } catch (error) {
    if (!(error instanceof Unreachable) && state.details === null) {
      byId("view").hidden = true;
      byId("state").hidden = false;
    }
    throw error;
  }
}

byId("title").textContent = state.run;
document.title = `${state.run} · ddpobs`;
followForm(choose);
followButtons();
followWhatif();
whatifLegend();
for (const bar of document.querySelectorAll("[role=toolbar]")) rove(bar, "a, button");
rove(byId("processes").tBodies[0], "button");
addEventListener("popstate", () => {
  const wanted = read(location.search);
  if (JSON.stringify(wanted.selection) === JSON.stringify(state.selection)) return; // A link within the page.
  Object.assign(state, wanted, { seen: null });
  runOnce(show);
});
onColors(() => runOnce(() => draw(false)));
refresh(showOrExplain, LIVE_REFRESH_S);
