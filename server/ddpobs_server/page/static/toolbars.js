// The tools of a figure for a keyboard: one Tab stop, arrow keys between the tools, and a name for each.

const MOVES = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 };

// Bokeh draws in shadow roots; each button and each drawing area is a Tab stop of its own there.
export function nameTools(plot, title) {
  for (const node of inside(plot)) {
    if (node.matches(".bk-events")) node.tabIndex = -1;
    if (node.matches(".bk-Toolbar")) nameBar(node, title);
  }
}

function nameBar(bar, title) {
  // Bokeh renders a bar anew when its width changes.
  if (!bar.hasAttribute("role"))
    new MutationObserver(() => nameBar(bar, title)).observe(bar.shadowRoot, { childList: true });
  const buttons = [...inside(bar)].filter((node) => node.tabIndex >= 0);
  bar.setAttribute("role", "toolbar");
  bar.setAttribute("aria-label", `Tools of ${title}`);
  for (const [index, button] of buttons.entries()) {
    button.tabIndex = index ? -1 : 0;
    button.setAttribute("role", "button");
    button.setAttribute("aria-label", toolName(button));
    button.onkeydown = (event) => {
      const next = buttons[index + MOVES[event.key]];
      if (!next) return;
      event.preventDefault();
      [button.tabIndex, next.tabIndex] = [-1, 0];
      next.focus();
    };
  }
}

function toolName(button) {
  if (button.matches(".bk-tool-overflow")) return "More tools";
  return [...new Set(button.title.split("\n"))].join(" ").replace("(x-axis)", "steps or time");
}

function* inside(node) {
  for (const child of (node.shadowRoot ?? node).querySelectorAll("*")) {
    yield child;
    if (child.shadowRoot) yield* inside(child);
  }
}
