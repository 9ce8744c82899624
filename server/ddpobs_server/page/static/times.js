// Times and quantities as text, and the collector's clock.

const MAX_DRIFT_MS = 2000;
const MIN_LARGE = 999.5; // From here on a number has no digit after the point.
const MIN_SECONDS = 120;
const MIN_MINUTES = 120;
const MIN_HOURS = 48;
const collector = { ahead_ms: 0 }; // The collector's clock minus this computer's, to the second.

// The time on the collector's clock, in ms.
export function now() {
  return Date.now() + collector.ahead_ms;
}

// Follow the collector's clock by the date of a response.
export function setCollectorTime(date) {
  const time_ms = Date.parse(date);
  if (time_ms && Math.abs(time_ms - now()) > MAX_DRIFT_MS) collector.ahead_ms = time_ms - Date.now();
}

// A time in UTC, with its date. As `ddpobs.shared.quantities.time_of_day`.
export function clock(ns) {
  const time = new Date(ns / 1e6);
  if (isNaN(time)) return "unknown time"; // A client's clock may be absurd.
  return `${time.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

export function ago(ns) {
  const seconds = Math.max(0, now() / 1000 - ns / 1e9);
  if (seconds < 90) return `${seconds.toFixed(0)} s ago`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min ago`;
  if (seconds < 129600) return `${(seconds / 3600).toFixed(0)} h ago`;
  return clock(ns);
}

// A time with its unit: three digits, or its two largest units. As `ddpobs.shared.quantities.duration`.
export function duration(ns) {
  if (ns === null || ns === undefined) return "–";
  if (!ns) return "0 s";
  const units = { ns: 1, µs: 1e3, ms: 1e6 };
  const [unit, size] = Object.entries(units).find(([, each]) => ns < MIN_LARGE * each) ?? ["s", 1e9];
  const seconds = Math.round(ns / 1e9);
  if (unit !== "s" || seconds < MIN_SECONDS) return `${threeDigits(ns / size)} ${unit}`;
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (minutes < MIN_MINUTES) return `${minutes} min ${seconds % 60} s`;
  if (hours < MIN_HOURS) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function threeDigits(value) {
  return value < MIN_LARGE ? String(+value.toPrecision(3)) : value.toFixed(0);
}

// The begin and the end of an attempt, with the date; the end is null while it runs.
export function clockRange(began_ns, ended_ns) {
  return ended_ns === null ? `${clock(began_ns)} to now` : timeRange(began_ns, ended_ns, true);
}

// Two times in UTC and the time between; with their dates if these differ. As `ddpobs.shared.quantities.time_range`.
export function timeRange(began_ns, ended_ns, isDated = false) {
  if (began_ns === ended_ns) return clock(began_ns);
  const [began, ended] = [clock(began_ns), clock(ended_ns)];
  const took = `(${duration(Math.max(0, ended_ns - began_ns))})`;
  const [date, time] = began.split(" ");
  if (!ended.startsWith(date)) return `${began.replace(" UTC", "")} – ${ended} ${took}`;
  return `${isDated ? `${date} ` : ""}${time}–${ended.slice(date.length + 1)} ${took}`;
}

// Whether a fact is known: imported files that lack it make a run that has `unknown`.
export function isKnown(text) {
  return Boolean(text) && text !== "unknown";
}

// A setting or another fact in words: four digits of a number that is no integer. As `ddpobs.shared.words.fact_text`.
export function short(value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" && !Number.isInteger(value) ? String(+value.toPrecision(4)) : String(value);
}
