// Files that others recorded, uploaded to become a run.

import { root, upload } from "./api.js";
import { dialog } from "./dialog.js";
import { element } from "./elements.js";

// Ask for files and a name; open the run that they make.
export function importFiles() {
  const files = element("input", { type: "file", id: "import-files", multiple: "", required: "" });
  const name = element("input", {
    id: "import-name",
    required: "",
    pattern: "[A-Za-z0-9._\\-]{1,128}",
    autocomplete: "off",
  });
  const bar = element("progress", { "aria-label": "Progress of the import" });
  const step = element("p", { class: "muted", role: "status" });
  bar.hidden = step.hidden = true;
  files.addEventListener("change", () => (name.value ||= nameOf(files.files[0]?.name ?? "")));
  const content = [
    element(
      "p",
      { class: "muted" },
      "Traces of torch.profiler, dumps of the Flight Recorder and others: one of each rank.",
    ),
    element("label", { for: files.id }, "Files"),
    files,
    element("label", { for: name.id }, "Name of the run"),
    name,
    bar,
    step,
  ];
  dialog(
    "Import files",
    content,
    "Import",
  )(async () => {
    bar.hidden = step.hidden = false;
    try {
      await send([...files.files], name.value, (sent, total) => showProgress(bar, step, sent, total));
    } finally {
      bar.hidden = step.hidden = true;
    }
    location.href = `${root}/runs/${encodeURIComponent(name.value)}`;
  });
}

// The body has the files one after the other; the address has their names and sizes.
function send(files, run, progress) {
  const query = new URLSearchParams(files.map((file) => ["file", `${file.name}:${file.size}`]));
  return upload(`/runs/${encodeURIComponent(run)}/import?${query}`, new Blob(files), progress);
}

function showProgress(bar, step, sent, total) {
  if (sent < total) {
    bar.value = sent / total;
    step.textContent = `Sending: ${Math.floor((100 * sent) / total)} % of ${(total / 1e6).toFixed(1)} MB`;
  } else {
    bar.removeAttribute("value");
    step.textContent = "Reading the files …";
  }
}

function nameOf(file) {
  const stem = file.replace(/(\.pt\.trace)?(\.json|\.parquet|\.log)?(\.gz)?$/, "");
  return stem
    .replace(/[^A-Za-z0-9._-]+/g, "-")
    .replace(/^[-.]+/, "")
    .slice(0, 100);
}
