// The token of this tab, and the form that asks for one.

import { element } from "./elements.js";

const TOKEN = "ddpobs-token";
const state = { entering: null };

export function currentToken() {
  return sessionStorage.getItem(TOKEN);
}

// Replace the refused token; return whether there is another one. All requests that wait share one form.
export async function replaceToken(refused, reason, scope) {
  if (currentToken() !== refused) return true; // Entered while this request was in progress.
  state.entering ??= enter(refused, reason, scope).finally(() => (state.entering = null));
  return state.entering;
}

// A token that may not read is of no use; one that may only read stays if no other is entered.
async function enter(refused, reason, scope) {
  if (scope === "read") sessionStorage.removeItem(TOKEN);
  const token = await ask(refused ? reason : "", `This collector needs a token with the scope ${scope}:`);
  if (token) sessionStorage.setItem(TOKEN, token);
  return Boolean(token);
}

function ask(reason, label) {
  const attributes = { type: "password", autocomplete: "current-password", required: "", id: "token-input" };
  const input = element("input", attributes);
  const dialog = element("dialog", { id: "token-form", "aria-labelledby": "token-title" }, form(reason, label, input));
  document.body.append(dialog);
  return new Promise((resolve) => {
    const end = (token) => {
      dialog.remove();
      resolve(token);
    };
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      end(input.value.trim());
    });
    dialog.querySelector("[value=cancel]").addEventListener("click", () => end(""));
    dialog.addEventListener("cancel", () => end(""));
    dialog.showModal();
  });
}

function form(reason, label, input) {
  const problem = element("p", { class: "problem" }, reason);
  problem.hidden = !reason;
  const hint = "It stays in this tab only. An operator creates one with: ddpobs-server token create";
  const use = element("button", { type: "submit", class: "main" }, "Use this token");
  const cancel = element("button", { type: "button", value: "cancel" }, "Cancel");
  const heading = element("h2", { id: "token-title" }, "Token");
  const content = [heading, problem, element("label", { for: input.id }, label), input];
  return element(
    "form",
    {},
    ...content,
    element("p", { class: "muted" }, hint),
    element("div", { class: "row" }, use, cancel),
  );
}
