// Tags and note of a run, and the dialogs about runs: to edit them, to delete runs, to compare a run.

import { dialog } from "./dialog.js";
import { element } from "./elements.js";

export function editLabels(run, save) {
  const tags = element("input", { id: "edit-tags", value: run.tags.join(", "), autocomplete: "off" });
  const note = element("textarea", { id: "edit-note", rows: "4", maxlength: "2000" });
  note.value = run.note;
  const tagsLabel = element("label", { for: tags.id }, "Tags, with commas between them");
  const content = [tagsLabel, tags, element("label", { for: note.id }, "Note"), note];
  const words = () => tags.value.split(",").map((tag) => tag.trim());
  dialog(
    `Tags and note of ${run.run}`,
    content,
    "Save",
  )(() => save({ tags: words().filter(Boolean), note: note.value.trim() }));
}

// The elements that show tags and note.
export function labelsOf({ tags, note }) {
  const words = tags.map((tag) => element("span", { class: "tag" }, `#${tag}`));
  return note ? [...words, element("span", { class: "note", title: note }, note)] : words;
}

// Ask for the run that this one is compared with: one with the same tag is offered first, else the run before it.
export function chooseOther(run, runs, compare) {
  const others = runs.filter((other) => other.run !== run.run);
  const before = others.filter(({ created_ns }) => created_ns <= run.created_ns);
  const likely = before.find(({ tags }) => tags.some((tag) => run.tags.includes(tag))) ?? before[0] ?? others[0];
  const attributes = { id: "other", list: "other-runs", required: "", autocomplete: "off", value: likely?.run ?? "" };
  const input = element("input", attributes);
  const options = others.map((other) => element("option", { value: other.run }));
  const label = element("label", { for: input.id }, "The other run, such as one before a change");
  const content = [label, input, element("datalist", { id: "other-runs" }, ...options)];
  dialog(`Compare ${run.run} with`, content, "Compare")(async () => compare(input.value.trim()));
  input.select();
}

export function confirmDelete(names, remove) {
  const list = element("ul", {}, ...names.map((name) => element("li", {}, name)));
  const title = names.length === 1 ? "Delete this run?" : `Delete these ${names.length} runs?`;
  const scope = "All data of it is removed from the collector, for everybody.";
  const text = `${scope} A training that still runs is refused from then on.`;
  dialog(
    title,
    [list, element("p", {}, text)],
    "Delete",
  )(async () => {
    for (const name of names) await remove(name);
  });
}
