// The selection of the run's page. It is in the address, so that a link shows the same view.

const NAMES = ["attempt", "steps", "rank", "step", "bucket", "finding", "match", "order", "whatif"];
const STEPS = /^\s*(\d{1,15})\s*(?:-\s*(\d{1,15})\s*)?$/;
const NUMBER = /^\d{1,15}$/;
const BUCKET = /^\d{1,7}(\.\d{1,7})?$/;
const MAX_KEY_RANKS = 4;
const VALID = {
  steps: STEPS,
  rank: NUMBER,
  step: NUMBER,
  bucket: BUCKET,
  order: /^(cost|rank|host)$/,
  whatif: /^[a-z_]+=[\w.]+(&[a-z_]+=[\w.]+)*$/,
};

// The selection of this address; a malformed part is left out, and named in `wrong`.
export function read(search) {
  const query = new URLSearchParams(search);
  const selection = {};
  const wrong = [];
  for (const name of NAMES) {
    const value = query.get(name);
    if (!value) continue;
    if (VALID[name] && !VALID[name].test(value)) wrong.push(name);
    else selection[name] = name === "bucket" ? bucketName(value) : value;
  }
  return { selection, wrong };
}

// A bucket as MODULE.BUCKET; one without its module is the first module's.
function bucketName(text) {
  return text.includes(".") ? text : `0.${text}`;
}

// Put the selection into the address, as a new entry of the history or in place of the last.
export function write(selection, replace) {
  const query = new URLSearchParams();
  for (const name of NAMES) if (selection[name]) query.set(name, selection[name]);
  const search = query.toString();
  const address = location.pathname + (search && `?${search}`);
  if (address !== location.pathname + location.search)
    history[replace ? "replaceState" : "pushState"](null, "", address);
}

// A selection after a change; an empty part selects nothing.
export function changed(selection, change) {
  return Object.fromEntries(Object.entries({ ...selection, ...change }).filter(([, value]) => value));
}

// First and last step of a selection; null if it selects none.
export function stepRange({ steps }) {
  const match = steps && STEPS.exec(steps);
  if (!match) return null;
  const ends = [Number(match[1]), Number(match[2] ?? match[1])];
  return [Math.min(...ends), Math.max(...ends)];
}

// Whether anything is selected beyond the attempt.
export function isEmpty(selection) {
  return !["steps", "rank", "step", "bucket", "finding"].some((name) => selection[name]);
}

// The selection of a finding: its steps, its rank and its bucket.
export function ofFinding(finding, key) {
  const interval = finding.intervals.at(-1);
  const [first, last] = interval ? [interval.from, interval.to] : finding.steps;
  return {
    finding: key,
    steps: last > first ? `${first}-${last}` : "",
    rank: finding.ranks.length === 1 ? String(finding.ranks[0]) : "",
    bucket: finding.buckets.length ? `${finding.evidence.module ?? 0}.${finding.buckets[0]}` : "",
    step: last === first ? String(first) : "",
  };
}

// A name of each finding that stays the same as long as the finding is about the same ranks.
export function findingKeys(findings) {
  const counts = new Map();
  return findings.map(({ code, ranks }) => {
    const key = [code, ...ranks.slice(0, MAX_KEY_RANKS)].join("-");
    const count = (counts.get(key) ?? 0) + 1;
    counts.set(key, count);
    return count > 1 ? `${key}.${count}` : key;
  });
}

// The ranks whose rows are marked: the selected one, or those of the selected finding unless it is about all.
export function markedRanks({ rank, finding }, findings, keys, count) {
  if (rank) return [Number(rank)];
  const { ranks } = findings[keys.indexOf(finding)] ?? { ranks: [] };
  return ranks.length < count ? ranks : [];
}
