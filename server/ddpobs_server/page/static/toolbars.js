// The tools of a figure for a keyboard: one Tab stop, arrow keys between the tools, and a name for each.

const MOVES = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 };

// Bokeh draws in shadow roots; each button and each drawing area is a Tab stop of its own there.
export function nameTools(plot, title) {
  for (const node of inside(plot)) {
    if (node.matches(".bk-events")) node.tabIndex = -1;
    if (node.matches(".bk-Toolbar")) nameBar(node, title);
  }
}

// The tool with the focus, by its place among the tools of a drawing; -1 if none has it.
export function focusedTool(plot) {
  return toolsOf(plot).findIndex((tool) => tool.matches(":focus"));
}

export function focusTool(plot, index) {
  toolsOf(plot)[index]?.focus({ preventScroll: true });
}

function toolsOf(plot) {
  return [...inside(plot)].filter((node) => node.matches(".bk-Toolbar")).flatMap(buttonsOf);
}

function nameBar(bar, title) {
  if (!bar.hasAttribute("role")) followBar(bar, title);
  const buttons = buttonsOf(bar);
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
      next.focus();
    };
    button.onfocus = () => {
      for (const each of buttons) each.tabIndex = each === button ? 0 : -1;
    };
  }
}

// Bokeh renders a bar anew when its width changes; a narrow one has its tools behind "More tools". Names, and the focus
// if it is there, go with the old buttons.
function followBar(bar, title) {
  let focused = -1;
  bar.shadowRoot.addEventListener("focusin", (event) => {
    focused = buttonsOf(bar).indexOf(event.composedPath()[0]);
  });
  bar.shadowRoot.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget) focused = -1;
  });
  new MutationObserver(() => {
    nameBar(bar, title);
    const buttons = buttonsOf(bar);
    if (focused >= 0 && document.activeElement === document.body) (buttons[focused] ?? buttons.at(-1))?.focus();
  }).observe(bar.shadowRoot, { childList: true });
}

function buttonsOf(bar) {
  return [...inside(bar)].filter((node) => node.hasAttribute("tabindex"));
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
