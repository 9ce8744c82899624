// The REST, with the token where the collector wants one, and small ways to build elements from text alone.

const TOKEN = "ddpobs-token";

// Passes by itself: the collector is away, or says that it cannot answer now.
export class Unreachable extends Error {}

export async function get(path) {
  return (await ask(`/api/v1${path}`)).json();
}

// A link cannot carry the token: with one, what it leads to is fetched and saved.
export function saveWithToken(link, name) {
  link.addEventListener("click", async (event) => {
    if (!sessionStorage.getItem(TOKEN)) return;
    event.preventDefault();
    try {
      const address = URL.createObjectURL(await (await ask(link.href)).blob());
      element("a", { href: address, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60_000);
    } catch (error) {
      notice(error.message);
    }
  });
}

async function ask(address) {
  const token = sessionStorage.getItem(TOKEN);
  let answer;
  try {
    answer = await fetch(address, { headers: token ? { Authorization: `Bearer ${token}` } : {} });
  } catch {
    throw new Unreachable("The collector does not answer");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));  // A proxy's own page is no problem document.
  const title = problem.title || `HTTP ${answer.status}`;
  const wantsToken = answer.status === 401 || answer.status === 403;
  if (wantsToken && another(token, problem.detail || title)) return ask(address);
  if (answer.status >= 500 || answer.status === 429) throw new Unreachable(title);
  throw new Error((problem.detail || title) + (wantsToken ? ". Reload the page to give a token." : ""));
}

// Whether there is a token other than the refused one, which is forgotten: kept, it would shut the page for this tab.
function another(refused, why) {
  if (sessionStorage.getItem(TOKEN) !== refused) return true;  // Typed while this answer was under way.
  sessionStorage.removeItem(TOKEN);
  const token = window.prompt(`${refused ? `${why}\n` : ""}This collector wants a token that may read:`);
  if (token) sessionStorage.setItem(TOKEN, token);
  return Boolean(token);
}

// Text is only ever set as text: names come from clients.
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
  const place = document.getElementById("notice");
  place.textContent = text || "";
  place.hidden = !text;
}

export function ms(ns) {
  if (ns === null || ns === undefined) return "–";
  const value = ns / 1e6;
  return `${value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(3)} ms`;
}

export function ago(ns) {
  const seconds = Math.max(0, Date.now() / 1000 - ns / 1e9);
  if (seconds < 90) return `${seconds.toFixed(0)} s ago`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min ago`;
  if (seconds < 129600) return `${(seconds / 3600).toFixed(0)} h ago`;
  return new Date(ns / 1e6).toISOString().slice(0, 16).replace("T", " ");
}

// For what a click or a choice asks for: what goes wrong is shown, and not tried again. These places then hold
// nothing, for what they held was asked for by another choice.
export async function tell(task, ...places) {
  try {
    await task();
    notice("");
  } catch (error) {
    for (const place of places) place.replaceChildren();
    notice(error.message);
  }
}

// Calls again while the page is visible, after `seconds` or those that the task returns. It ends with a task that
// returns false, and with a refusal; what passes by itself is shown and tried again.
export async function refresh(task, seconds) {
  let wait = seconds;
  try {
    wait = (await task()) ?? seconds;
    notice("");
    if (wait === false) return;
  } catch (error) {
    const passes = error instanceof Unreachable;
    notice(passes ? `${error.message}; trying again.` : error.message);
    if (!passes) return;
  }
  setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", () => refresh(task, seconds), { once: true }) : refresh(task, seconds)), wait * 1000);
}
