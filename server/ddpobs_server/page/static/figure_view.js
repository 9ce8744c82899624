// A figure of the run: drawn by BokehJS from an item that the collector made, with its summary and its table.

import { get, Unreachable } from "./api.js";
import { element } from "./elements.js";
import { focusTool, focusedTool, nameTools } from "./toolbars.js";

const LEGEND_COLUMN_PX = 165;
const MAX_LEGEND_COLUMNS = 9;
const SECTION_PADDING_PX = 20;
const dark = matchMedia("(prefers-color-scheme: dark)");

export class FigureView {
  // `kind` is an element of `/figures`, `controls` are elements that belong to it, `address` makes a path of a query.
  constructor(kind, controls, address) {
    Object.assign(this, { kind, address, query: null, data: null, views: null, zoomed: () => false });
    this.heading = element("h2", {}, kind.title);
    this.summary = element("p", { class: "muted summary" }, "Loading …");
    this.plot = element("div", { class: "plot", role: "group" });
    this.table = element("div", { class: "scroll", tabindex: "0", role: "region" });
    this.details = element("details", {}, element("summary", {}, "As a table"), this.table);
    this.details.hidden = true;
    const [above, below] = [false, true].map((isBelow) =>
      controls.filter((node) => node.classList.contains("below") === isBelow),
    );
    const content = [this.heading, this.summary, ...above, this.plot, ...below, this.details];
    this.section = element("section", { class: "card figure", id: `figure-${kind.figure}` }, ...content);
  }

  // What is drawn: steps, ranks and step.
  get shown() {
    return this.data?.shown ?? {};
  }

  // Request and draw the figure. A refresh leaves a figure alone that the reader has zoomed, points at or has focused.
  async show(query, isRefresh = false) {
    const text = this.#text(query);
    if (isRefresh && this.query === text && (this.zoomed() || this.plot.matches(":hover, :focus-within"))) return;
    this.query = text;
    const data = await this.#read(text);
    if (data === null || this.query !== text) return; // Another selection was made meanwhile.
    this.data = data;
    this.heading.textContent = data.title;
    this.summary.textContent = data.summary;
    this.plot.setAttribute("aria-label", `${data.title}. ${data.summary}`);
    this.#showTable(data.table);
    await this.#draw(data.item);
  }

  #text(query) {
    const full = new URLSearchParams(query);
    if (dark.matches) full.set("dark", "true");
    const columns = Math.floor((this.section.clientWidth - SECTION_PADDING_PX) / LEGEND_COLUMN_PX);
    if (columns < MAX_LEGEND_COLUMNS) full.set("legend", String(Math.max(1, columns)));
    return full.toString();
  }

  // Return the figure; null if it is refused, with the reason as its summary.
  async #read(text) {
    try {
      return await get(this.address(`figures/${this.kind.figure}`, text));
    } catch (error) {
      this.query = null;
      this.summary.textContent = error.message;
      this.details.hidden = true;
      await this.#draw(null);
      if (error instanceof Unreachable) throw error;
      return null;
    }
  }

  #showTable({ columns, rows }) {
    this.details.hidden = rows.length === 0;
    this.table.setAttribute("aria-label", `${this.data.title} as a table`);
    const heads = columns.map((name) => element("th", { scope: "col" }, name));
    const lines = rows.map((row) => element("tr", {}, ...row.map((value) => element("td", {}, String(value)))));
    const head = element("thead", {}, element("tr", {}, ...heads));
    this.table.replaceChildren(element("table", {}, head, element("tbody", {}, ...lines)));
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
    if (this.views !== before) {
      holder.remove();
      return;
    }
    const tool = focusedTool(this.plot);
    discard(before);
    this.views = views;
    for (const child of [...this.plot.children]) if (child !== holder) child.remove();
    holder.classList.remove("incoming");
    this.#watch();
    nameTools(this.plot, this.data.title);
    focusTool(this.plot, tool);
  }

  get model() {
    return this.views ? [...this.views][0].model : null;
  }

  named(name) {
    return this.model?.document.get_model_by_name(name) ?? null;
  }

  #watch() {
    const { x_range: range } = this.model;
    const { start, end } = range;
    const renderers = [...this.model.renderers];
    this.zoomed = () => range.start !== start || range.end !== end || renderers.some((renderer) => !renderer.visible);
    this.model.on_event("tap", ({ x, y }) => this.onTap?.(x, y));
    this.model.on_event("mousemove", ({ x }) => this.onPoint?.(x));
    this.model.on_event("mouseleave", () => this.onPoint?.(null));
    this.model.on_event("selectiongeometry", ({ geometry: { type, x0, x1 }, final }) => {
      if (final && type === "rect") this.onSelect?.(Math.min(x0, x1), Math.max(x0, x1));
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
  const { documents } = window.Bokeh;
  const index = documents.indexOf([...views][0].model.document);
  views.clear();
  if (index >= 0) documents.splice(index, 1);
}

// Redraw when the colours of the page change.
export function onColors(redraw) {
  dark.addEventListener("change", redraw);
}
