// Times and quantities as text, and the collector's clock.

const CLOCK = new Intl.DateTimeFormat(undefined, {
  year: "numeric",
  month: "2-digit",
  day: "2-digit",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
  timeZoneName: "short",
});
const MAX_DRIFT_MS = 2000;
const MIN_SECONDS_MS = 10_000;
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

// A time of day in the reader's zone, with the zone.
export function clock(ns) {
  return CLOCK.format(new Date(ns / 1e6));
}

export function ago(ns) {
  const seconds = Math.max(0, now() / 1000 - ns / 1e9);
  if (seconds < 90) return `${seconds.toFixed(0)} s ago`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min ago`;
  if (seconds < 129600) return `${(seconds / 3600).toFixed(0)} h ago`;
  return new Date(ns / 1e6).toISOString().slice(0, 16).replace("T", " ") + " UTC";
}

// A time of a step in ms; a long one in s.
export function ms(ns) {
  if (ns === null || ns === undefined) return "–";
  const value = ns / 1e6;
  if (value >= MIN_SECONDS_MS) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(3)} ms`;
}

export function duration(ns) {
  const seconds = Math.round(ns / 1e9);
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (seconds < 60) return `${seconds} s`;
  if (hours < 1) return `${minutes} min ${seconds % 60} s`;
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// Four digits of a number that is no integer.
export function short(value) {
  return typeof value === "number" && !Number.isInteger(value) ? String(+value.toPrecision(4)) : String(value);
}
