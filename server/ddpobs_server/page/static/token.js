// The token of this tab, and the form that asks for one.

const TOKEN = "ddpobs-token";
let entering = null;

export function currentToken() {
  return sessionStorage.getItem(TOKEN);
}

// Replace the refused token; return whether there is another one. All requests that wait share one form.
export async function replaceToken(refused, reason, scope) {
  if (currentToken() !== refused) return true;  // Entered while this request was in progress.
  entering ??= enter(refused, reason, scope).finally(() => (entering = null));
  return entering;
}

// A token that may not read is of no use; one that may only read stays if no other is entered.
async function enter(refused, reason, scope) {
  if (scope === "read") sessionStorage.removeItem(TOKEN);
  const token = await form(refused ? reason : "", `This collector needs a token with the scope ${scope}:`);
  if (token) sessionStorage.setItem(TOKEN, token);
  return Boolean(token);
}

function form(reason, label) {
  const dialog = build("dialog", { id: "token-form", "aria-labelledby": "token-title" });
  const input = build("input", { type: "password", autocomplete: "current-password", required: "", id: "token-input" });
  const why = build("p", { class: "problem" }, reason);
  why.hidden = !reason;
  dialog.append(build("form", {},
    build("h2", { id: "token-title" }, "Token"), why,
    build("label", { for: "token-input" }, label), input,
    build("p", { class: "muted" }, "It stays in this tab only. An operator creates one with: ddpobs-server token create"),
    build("div", { class: "row" }, build("button", { type: "submit", class: "main" }, "Use this token"), build("button", { type: "button", value: "cancel" }, "Cancel"))));
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

function build(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
