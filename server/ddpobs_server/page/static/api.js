// Requests to the REST API, with a token if the collector needs one.

import { element, notice } from "./elements.js";
import { setCollectorTime } from "./times.js";
import { currentToken, replaceToken } from "./token.js";

// The path under which a proxy serves the collector, such as /ddpobs; empty without a proxy's path.
export const root = new URL("..", import.meta.url).pathname.slice(0, -1);

// A temporary failure: the collector does not respond, or responds that it cannot serve the request now.
export class Unreachable extends Error {}

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

// Send bytes, with `progress(sent, total)` meanwhile, which `fetch` does not report.
export async function upload(path, body, progress) {
  const send = (address, { headers }) =>
    new Promise((resolve, reject) => {
      const sending = new XMLHttpRequest();
      sending.open("POST", address);
      const all = { ...headers, "Content-Type": "application/octet-stream" };
      for (const [name, value] of Object.entries(all)) sending.setRequestHeader(name, value);
      sending.upload.addEventListener("progress", ({ loaded, total }) => progress(loaded, total));
      sending.addEventListener("load", () => resolve(responseOf(sending)));
      sending.addEventListener("error", () => reject(new Unreachable("The collector does not respond")));
      sending.send(body);
    });
  return (await request(`${root}/api/v1${path}`, {}, "ingest", send)).json();
}

function responseOf(sent) {
  return new Response(sent.responseText, {
    status: sent.status,
    headers: { Date: sent.getResponseHeader("Date") ?? "" },
  });
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

async function request(address, options = {}, scope = "read", sender = send) {
  const token = currentToken();
  const response = await sender(address, { ...options, headers: authorization(token) });
  setCollectorTime(response.headers.get("Date"));
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({})); // A proxy's error page is not a problem document.
  const title = problem.title || `HTTP ${response.status}`;
  const reason = problem.detail || title;
  const needsToken = response.status === 401 || response.status === 403;
  if (needsToken && (await replaceToken(token, reason, scope))) return request(address, options, scope, sender);
  if (response.status >= 500 || response.status === 429) throw new Unreachable(title);
  throw new Error(needsToken && scope === "read" ? `${reason}. Reload the page to enter a token.` : reason);
}

const authorization = (token) => (token ? { Authorization: `Bearer ${token}` } : {});

async function send(address, options) {
  try {
    return await fetch(address, options);
  } catch {
    throw new Unreachable("The collector does not respond");
  }
}
