// Opens a trace in the Perfetto UI that the collector serves, in a tab of its own.

import { getBytes, root } from "./api.js";

const PING_MS = 100;
const GIVE_UP_MS = 120_000;

// Call it in a click: otherwise the browser does not open a tab. Returns after the trace was handed over.
export async function openTrace(path, title) {
  const ui = window.open(`${root}/perfetto/index.html#!/viewer`, "_blank");
  if (!ui) throw new Error("The browser did not open a tab: allow pop-ups of this page");
  try {
    const [buffer] = await Promise.all([getBytes(path), ready(ui)]);
    ui.postMessage({ perfetto: { buffer, title, fileName: "trace.json" } }, location.origin, [buffer]);
  } catch (error) {
    ui.close();
    throw error;
  }
}

// Wait until the UI answers: it listens only after it has started.
function ready(ui) {
  return new Promise((resolve, reject) => {
    const until = Date.now() + GIVE_UP_MS;
    const end = (settle, value) => {
      clearInterval(timer);
      removeEventListener("message", answer);
      settle(value);
    };
    const answer = ({ data, source, origin }) => {
      if (data === "PONG" && source === ui && origin === location.origin) end(resolve);
    };
    const timer = setInterval(() => {
      if (ui.closed || Date.now() > until) end(reject, new Error("The trace viewer did not start"));
      else ui.postMessage("PING", location.origin);
    }, PING_MS);
    addEventListener("message", answer);
  });
}
