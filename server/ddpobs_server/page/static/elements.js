// Builders of elements whose content is text only: names come from clients, and are never set as HTML.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// The rows of a list of facts; facts are pairs of a name and a text.
export function factRows(facts) {
  return facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, ...withCode(text))]);
}

// The text with what stands between backticks as code.
function withCode(text) {
  return String(text)
    .split(/`([^`]+)`/)
    .map((part, index) => (index % 2 ? element("code", {}, part) : part));
}

// Replace the content of a node, unless it is the same: focus, text selection and scrolling stay then. Otherwise the
// focus stays on the element with the same `data-key`, or on the part of the page around it.
export function renew(node, ...fresh) {
  const shown = [...node.childNodes];
  if (shown.length === fresh.length && fresh.every((child, index) => child.isEqualNode(shown[index]))) return;
  const { activeElement: focused } = document;
  const key = node.contains(focused) && focused !== node ? (focused.dataset.key ?? "") : null;
  node.replaceChildren(...fresh);
  if (key === null) return;
  const same = key && node.querySelector(`[data-key="${CSS.escape(key)}"]`);
  (same || node.closest("[tabindex]"))?.focus({ preventScroll: true });
}

export function notice(text) {
  const box = byId("notice");
  box.textContent = text || "";
  box.hidden = !text;
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
