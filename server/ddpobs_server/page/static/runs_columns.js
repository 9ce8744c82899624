// The columns of the list of runs: the values that they sort by, and which runs match the filters.

const SEVERITIES = ["critical", "warning", "info"];

// `down`: whether a first click sorts the largest first. A column without a key is not sorted.
export const COLUMNS = [
  { title: "Select" },
  { key: "run", title: "Run", down: false },
  { key: "state", title: "State", down: false },
  { key: "finding", title: "Worst finding", down: true },
  { key: "gain", title: "Gain", number: true, down: true },
  { key: "step", title: "Step time", number: true, down: true },
  { key: "rate", title: "Steps/s", number: true, down: true },
  { key: "steps", title: "Steps", number: true, down: true },
  { key: "goodput", title: "Goodput", number: true, down: false },
  { key: "duration", title: "Duration", number: true, down: true },
  { key: "started", title: "Started (UTC)", down: true },
  { title: "Edit" },
];
const VALUES = {
  run: ({ run }) => run,
  state: ({ state }) => state,
  finding: ({ diagnosis }) => diagnosis && severityRank(diagnosis.severity),
  gain: ({ diagnosis }) => diagnosis?.gain?.ratio ?? null,
  step: ({ step_ns }) => step_ns,
  rate: ({ steps_per_s }) => steps_per_s,
  steps: ({ steps }) => steps,
  goodput: ({ diagnosis }) => diagnosis?.goodput ?? null,
  duration: ({ duration_ns }) => duration_ns,
  started: ({ created_ns }) => created_ns,
};

// Sort runs. Unknown values are last in both directions; equal ones are newest first.
export function sorted(runs, { key, down }) {
  const sign = down ? -1 : 1;
  const compare = (x, y) => {
    if (x === null || y === null) return (x === null) - (y === null);
    return x < y ? -sign : x > y ? sign : 0;
  };
  return runs.toSorted((a, b) => compare(VALUES[key](a), VALUES[key](b)) || b.created_ns - a.created_ns);
}

// The collector has selected the runs by their words and their start.
export function matches(run, { state, severity }) {
  if (state && run.state !== state) return false;
  return !severity || hasSeverity(run.diagnosis, severity);
}

// Whether the worst finding is at least as severe, or for `none` there is no finding.
function hasSeverity(diagnosis, severity) {
  if (!diagnosis) return false;
  if (severity === "none") return !diagnosis.severity;
  return severityRank(diagnosis.severity) >= severityRank(severity);
}

// 3 for critical, 1 for info, 0 for none.
function severityRank(severity) {
  const place = SEVERITIES.indexOf(severity);
  return place < 0 ? 0 : SEVERITIES.length - place;
}
