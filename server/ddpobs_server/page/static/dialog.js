// A dialog with a task that it starts.

import { element } from "./elements.js";

// Open a dialog. Return a function that sets its task: the dialog closes after the task; if the task fails, it shows
// the reason and stays open.
export function dialog(title, content, action) {
  const problem = element("p", { class: "problem" });
  problem.hidden = true;
  const submit = element("button", { type: "submit", class: "main" }, action);
  const cancel = element("button", { type: "button" }, "Cancel");
  const heading = element("h2", { id: "dialog-title" }, title);
  const form = element("form", {}, heading, ...content, problem, element("div", { class: "row" }, submit, cancel));
  const box = element("dialog", { "aria-labelledby": "dialog-title" }, form);
  document.body.append(box);
  cancel.addEventListener("click", () => box.close());
  box.addEventListener("close", () => box.remove());
  box.showModal();
  return (task) =>
    form.addEventListener("submit", async (event) => {
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
