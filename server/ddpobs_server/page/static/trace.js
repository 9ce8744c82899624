// The one control for traces: a dialog with the steps, which opens them in Perfetto or saves them.

import { root, saveWithToken } from "./api.js";
import { dialog } from "./dialog.js";
import { element } from "./elements.js";
import { openTrace } from "./perfetto.js";

const MAX_STEPS = 50;
const STEPS = /^\s*(\d{1,15})\s*(?:-\s*(\d{1,15})\s*)?$/;

// Offer the trace of these steps. `address` makes the path of a query; `hasViewer` tells whether the collector serves
// the Perfetto UI. Without it nothing is sent anywhere: the dialog says what to install, and saves the file.
export function offerTrace([first, last], address, title, hasViewer) {
  const steps = element("input", { value: first === last ? first : `${first}-${last}`, required: "", size: 14 });
  const path = () => address("trace", range(steps.value));
  const target = () => `${root}/api/v1${path()}`;
  const save = element("a", { download: "trace.json", href: target() }, "Save the file");
  save.addEventListener("click", (event) => {
    try {
      save.href = target();
    } catch (error) {
      event.preventDefault();
      event.stopImmediatePropagation();
      steps.setCustomValidity(error.message);
      steps.reportValidity();
    }
  });
  saveWithToken(save, "trace.json");
  steps.addEventListener("input", () => steps.setCustomValidity(""));
  save.hidden = !hasViewer;
  const content = [element("label", {}, `Steps, at most ${MAX_STEPS} `, steps), element("p", {}, save)];
  if (!hasViewer) content.push(...withoutViewer());
  dialog(
    "Trace",
    content,
    hasViewer ? "Open in Perfetto" : "Save the file",
  )(async () => {
    const valid = path();
    if (hasViewer) await openTrace(valid, `${title}: step ${steps.value}`);
    else save.click();
  });
}

function range(text) {
  const match = STEPS.exec(text);
  if (!match) throw new Error(`Steps: expected one such as 4412, or 4410-4420, got ${text || "nothing"}`);
  const [from, to] = [Number(match[1]), Number(match[2] ?? match[1])].sort((a, b) => a - b);
  if (to - from >= MAX_STEPS) throw new Error(`Steps: expected at most ${MAX_STEPS}, got ${to - from + 1}`);
  return { from, to };
}

function withoutViewer() {
  const install = "To open steps here, install the Perfetto UI beside the collector, and start it again:";
  return [
    element("p", {}, "Open the file at https://ui.perfetto.dev, which reads it in the browser."),
    element("p", {}, install),
    element("pre", {}, "pip install 'ddpobs[perfetto]'"),
  ];
}
