// Requests to the REST API, with a token if the collector needs one; builders of elements whose content is text only.

import { currentToken, replaceToken } from "./token.js";

// The path under which a proxy serves the collector, such as /ddpobs; empty without a proxy's path.
export const root = new URL("..", import.meta.url).pathname.slice(0, -1);

// A temporary failure: the collector does not respond, or responds that it cannot serve the request now.
export class Unreachable extends Error {}

let ahead_ms = 0;  // The collector's clock minus this computer's, to the second.

// The time on the collector's clock, in ms.
export function now() {
  return Date.now() + ahead_ms;
}

export async function get(path) {
  return (await request(`${root}/api/v1${path}`)).json();
}

export async function getBytes(path) {
  return (await request(`${root}/api/v1${path}`)).arrayBuffer();
}

// Change something: the request needs a token with `scope`, if the collector has tokens.
export async function change(method, path, body, scope) {
  const options = body === null ? { method } : { method, body: JSON.stringify(body) };
  const response = await request(`${root}/api/v1${path}`, options, scope);
  return response.status === 204 ? null : response.json();
}

// A link cannot send the token: if there is one, fetch the link's target and save it as a file.
export function saveWithToken(link, name) {
  link.addEventListener("click", async (event) => {
    if (!currentToken()) return;
    event.preventDefault();
    try {
      const address = URL.createObjectURL(await (await request(link.href)).blob());
      element("a", { href: address, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60_000);
    } catch (error) {
      notice(error.message);
    }
  });
}

async function request(address, options = {}, scope = "read") {
  const token = currentToken();
  let response;
  try {
    response = await fetch(address, { ...options, headers: token ? { Authorization: `Bearer ${token}` } : {} });
  } catch {
    throw new Unreachable("The collector does not respond");
  }
  const date = Date.parse(response.headers.get("Date"));
  if (date) ahead_ms = Math.abs(date - now()) > 2000 ? date - Date.now() : ahead_ms;
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));  // A proxy's error page is not a problem document.
  const title = problem.title || `HTTP ${response.status}`;
  const needsToken = response.status === 401 || response.status === 403;
  if (needsToken && (await replaceToken(token, problem.detail || title, scope))) return request(address, options, scope);
  if (response.status >= 500 || response.status === 429) throw new Unreachable(title);
  throw new Error((problem.detail || title) + (needsToken && scope === "read" ? ". Reload the page to enter a token." : ""));
}

// Names come from clients: they are only ever set as text, never as HTML.
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function notice(text) {
  const box = document.getElementById("notice");
  box.textContent = text || "";
  box.hidden = !text;
}

export function ms(ns) {
  if (ns === null || ns === undefined) return "–";
  const value = ns / 1e6;
  return `${value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(3)} ms`;
}

export function ago(ns) {
  const seconds = Math.max(0, now() / 1000 - ns / 1e9);
  if (seconds < 90) return `${seconds.toFixed(0)} s ago`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min ago`;
  if (seconds < 129600) return `${(seconds / 3600).toFixed(0)} h ago`;
  return new Date(ns / 1e6).toISOString().slice(0, 16).replace("T", " ") + " UTC";
}

// Run the task of a click or a choice once. If it fails, show the error and clear the task's elements: their content
// belongs to an earlier choice.
export async function runOnce(task, ...elements) {
  try {
    await task();
    notice("");
  } catch (error) {
    for (const target of elements) target.replaceChildren();
    notice(error.message);
  }
}

// Run the task again and again while the page is visible, after `seconds` or the number that the task returns. End when
// the task returns false or is refused. Show a temporary failure and try again.
export async function refresh(task, seconds) {
  let wait = seconds;
  try {
    wait = (await task()) ?? seconds;
    notice("");
    if (wait === false) return;
  } catch (error) {
    const temporary = error instanceof Unreachable;
    notice(temporary ? `${error.message}; trying again.` : error.message);
    if (!temporary) return;
  }
  setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", () => refresh(task, seconds), { once: true }) : refresh(task, seconds)), wait * 1000);
}
