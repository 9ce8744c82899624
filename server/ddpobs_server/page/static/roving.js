// One Tab stop for controls that belong together: arrow keys, Home and End move among them.

const MOVES = { ArrowRight: 1, ArrowLeft: -1 };

// Follow the keys in a container, whose controls match `selector`. Those that are hidden are left out. The stop is the
// first control that `isStop` holds for, else the first one. In rows of so many columns, up and down keep the column.
export function rove(container, selector, isStop = () => false, columns = 1) {
  const moves = { ...MOVES, ArrowDown: columns, ArrowUp: -columns };
  const controls = () => [...container.querySelectorAll(selector)];
  setStop(controls(), controls().find(isStop) ?? controls()[0]);
  container.addEventListener("focusin", ({ target }) => {
    if (target.matches(selector)) setStop(controls(), target);
  });
  container.addEventListener("keydown", (event) => {
    const all = controls().filter((control) => control.checkVisibility());
    const index = all.indexOf(event.target);
    if (index < 0) return;
    const ends = { Home: 0, End: all.length - 1 };
    const next = all[ends[event.key] ?? index + moves[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}

function setStop(controls, stop) {
  for (const control of controls) control.tabIndex = control === stop ? 0 : -1;
}
