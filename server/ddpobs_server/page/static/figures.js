// A figure of the run: drawn by BokehJS from an item that the collector made, with its summary and its table.

import { element, get, Unreachable } from "./api.js";

const COLUMN_PX = 165;
const dark = matchMedia("(prefers-color-scheme: dark)");

export class FigureView {
  constructor(section, name, address) {
    Object.assign(this, { section, name, address, query: null, data: null, views: null, zoomed: () => false });
    this.summary = element("p", { class: "muted summary" });
    this.plot = element("div", { class: "plot", role: "group" });
    this.table = element("div", { class: "scroll", tabindex: "0", role: "region" });
    this.details = element("details", {}, element("summary", {}, "As a table"), this.table);
    this.heading = element("h2", {}, "Loading …");
    section.prepend(this.heading, this.summary);
    section.append(this.plot, ...section.querySelectorAll(".below"), this.details);
    this.details.hidden = true;
  }

  // Request and draw the figure. A refresh leaves a figure alone that the reader has zoomed or points at.
  async show(query, refresh = false) {
    const full = new URLSearchParams(query);
    if (dark.matches) full.set("dark", "true");
    const columns = Math.floor((this.section.clientWidth - 20) / COLUMN_PX);
    if (columns < 9) full.set("legend", String(Math.max(1, columns)));
    const text = full.toString();
    if (refresh && this.query === text && (this.zoomed() || this.plot.matches(":hover"))) return;
    this.query = text;
    let data;
    try {
      data = await get(this.address(`figures/${this.name}`, text));
    } catch (error) {
      this.query = null;
      this.summary.textContent = error.message;
      this.details.hidden = true;
      await this.#draw(null);
      if (error instanceof Unreachable) throw error;
      return;
    }
    if (this.query !== text) return;  // Another selection was made meanwhile.
    this.data = data;
    this.heading.textContent = data.title;
    this.summary.textContent = data.summary;
    this.plot.setAttribute("aria-label", `${data.title}. ${data.summary}`);
    this.#showTable(data.table);
    await this.#draw(data.item);
  }

  #showTable({ columns, rows }) {
    this.details.hidden = rows.length === 0;
    this.table.setAttribute("aria-label", `${this.data.title} as a table`);
    this.table.replaceChildren(element("table", {},
      element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((value) => element("td", {}, String(value))))))));
  }

  async #draw(item) {
    const before = this.views;
    if (!item) {
      discard(before);
      this.views = null;
      this.plot.replaceChildren();
      return;
    }
    // The old drawing stays until the new one is complete.
    const holder = element("div", { class: "incoming" });
    this.plot.append(holder);
    const views = await window.Bokeh.embed.embed_item(item, holder);
    if (this.views !== before) return holder.remove();
    discard(before);
    this.views = views;
    for (const child of [...this.plot.children]) if (child !== holder) child.remove();
    holder.classList.remove("incoming");
    this.#watch();
  }

  get model() {
    return this.views ? [...this.views][0].model : null;
  }

  named(name) {
    return this.model?.document.get_model_by_name(name) ?? null;
  }

  #watch() {
    const { x_range: range } = this.model, { start, end } = range, renderers = [...this.model.renderers];
    this.zoomed = () => range.start !== start || range.end !== end || renderers.some((renderer) => !renderer.visible);
    this.model.on_event("tap", ({ x, y }) => this.onTap?.(x, y));
    this.model.on_event("mousemove", ({ x }) => this.onPoint?.(x));
    this.model.on_event("mouseleave", () => this.onPoint?.(null));
    this.model.on_event("selectiongeometry", ({ geometry, final }) => {
      if (final && geometry.type === "rect") this.onSelect?.(Math.min(geometry.x0, geometry.x1), Math.max(geometry.x0, geometry.x1));
    });
    this.onDrawn?.();
  }

  // Move a mark of the figure, or hide it.
  mark(name, place) {
    const model = this.named(name);
    if (!model) return;
    if (place) model.setv({ ...place, visible: true });
    else model.visible = false;
  }
}

// BokehJS keeps each document until it is removed.
function discard(views) {
  if (!views) return;
  const { documents } = window.Bokeh, index = documents.indexOf([...views][0].model.document);
  views.clear();
  if (index >= 0) documents.splice(index, 1);
}

// Redraw when the colours of the page change.
export function onColors(redraw) {
  dark.addEventListener("change", redraw);
}
