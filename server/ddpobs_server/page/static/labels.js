// Tags and note of a run, and the dialogs of the pages: to edit them, to delete runs, to compare a run.

import { element } from "./api.js";

export function dialog(title, content, action) {
  const problem = element("p", { class: "problem" });
  problem.hidden = true;
  const submit = element("button", { type: "submit", class: "main" }, action), cancel = element("button", { type: "button" }, "Cancel");
  const form = element("form", {}, element("h2", { id: "dialog-title" }, title), ...content, problem, element("div", { class: "row" }, submit, cancel));
  const box = element("dialog", { "aria-labelledby": "dialog-title" }, form);
  document.body.append(box);
  cancel.addEventListener("click", () => box.close());
  box.addEventListener("close", () => box.remove());
  box.showModal();
  // Close after the task; if it fails, show why and stay open.
  return (task) => form.addEventListener("submit", async (event) => {
    event.preventDefault();
    submit.disabled = true;
    try {
      await task();
      box.close();
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
    submit.disabled = false;
  });
}

export function editLabels(run, save) {
  const tags = element("input", { id: "edit-tags", value: run.tags.join(", "), autocomplete: "off" });
  const note = element("textarea", { id: "edit-note", rows: "4", maxlength: "2000" });
  note.value = run.note;
  const content = [element("label", { for: "edit-tags" }, "Tags, with commas between them"), tags, element("label", { for: "edit-note" }, "Note"), note];
  dialog(`Tags and note of ${run.run}`, content, "Save")(() => save({ tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), note: note.value.trim() }));
}

// The elements that show tags and note.
export function labelsOf({ tags, note }) {
  return [...tags.map((tag) => element("span", { class: "tag" }, `#${tag}`)), ...(note ? [element("span", { class: "note", title: note }, note)] : [])];
}

// Ask for the run that this one is compared with: one with the same tag is offered first, else the run before it.
export function chooseOther(run, runs, compare) {
  const others = runs.filter((other) => other.run !== run.run);
  const before = others.filter(({ created_ns }) => created_ns <= run.created_ns);
  const likely = before.find(({ tags }) => tags.some((tag) => run.tags.includes(tag))) ?? before[0] ?? others[0];
  const input = element("input", { id: "other", list: "other-runs", required: "", autocomplete: "off", value: likely?.run ?? "" });
  const list = element("datalist", { id: "other-runs" }, ...others.map((other) => element("option", { value: other.run })));
  const content = [element("label", { for: "other" }, "The other run, such as one before a change"), input, list];
  dialog(`Compare ${run.run} with`, content, "Compare")(async () => compare(input.value.trim()));
  input.select();
}

export function confirmDelete(names, remove) {
  const list = element("ul", {}, ...names.map((name) => element("li", {}, name)));
  const title = names.length === 1 ? "Delete this run?" : `Delete these ${names.length} runs?`;
  const content = [list, element("p", {}, "All data of it is removed from the collector, for everybody. A training that still runs is refused from then on.")];
  dialog(title, content, "Delete")(async () => {
    for (const name of names) await remove(name);
  });
}
