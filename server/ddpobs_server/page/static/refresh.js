// Tasks of the pages: once after a click, or again and again.

import { Unreachable } from "./api.js";
import { notice } from "./elements.js";

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
  const wait_s = await attempt(task, seconds);
  if (wait_s === false) return;
  const again = () => refresh(task, seconds);
  setTimeout(() => {
    if (document.hidden) document.addEventListener("visibilitychange", again, { once: true });
    else again();
  }, wait_s * 1000);
}

// Return the seconds until the next attempt, or false after the last.
async function attempt(task, seconds) {
  try {
    const wait_s = (await task()) ?? seconds;
    notice("");
    return wait_s;
  } catch (error) {
    const isTemporary = error instanceof Unreachable;
    notice(isTemporary ? `${error.message}; trying again.` : error.message);
    return isTemporary ? seconds : false;
  }
}
