// The timeline, live: the bars of views/timeline.py with zoom and pan. Nothing is computed here but places on the page.
import { mount } from "./common.js";
import { el, heading, make, patch, svg, title } from "./dom.js";

const LEFT = 62;
const RIGHT = 10;
const EDGE = 32; // half of the longest label of the axis
const LANE = 21;
const HEAD = 34;
const GROUP = HEAD + 3 * LANE + 12;
let serial = 0;

/** The range moved and scaled by `factor` around the fraction `at` of it, kept within `extent`. */
export function zoomed([from, to], factor, at, extent) {
  const length = Math.min(Math.max((to - from) * factor, 0.05), extent[1] - extent[0]);
  return shifted([from + (to - from) * at - length * at, 0], length, 0, extent);
}

/** The range of `length` that begins at `from`, moved by `by`, kept within `extent`. */
export function shifted([from], length, by, extent) {
  const begin = Math.min(Math.max(from + by, extent[0]), Math.max(extent[0], extent[1] - length));
  return [begin, begin + length];
}

/** Round values within the range, about one each 110 px. */
export function ticks([from, to], width) {
  const rough = ((to - from) * 110) / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const values = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) values.push(Number((i * step).toPrecision(6)));
  return values;
}

/** What of a label fits in `width` px: all of it, its beginning, or nothing. */
export function fitting(label, width) {
  const room = Math.floor((width - 6) / 5.6);
  if (label.length <= room) return label;
  return room >= 5 ? `${label.slice(0, room - 1)}…` : "";
}

/** The bars of a runner that are in view: their place on the page, and the bar itself. */
export function place(bars, view, width) {
  const scale = (width - LEFT - RIGHT) / (view[1] - view[0]);
  const found = [];
  for (const bar of bars) {
    const [, , begin, length] = bar;
    if (begin > view[1] || begin + length < view[0]) continue;
    const from = Math.max(begin, view[0]);
    const to = Math.min(begin + length, view[1]);
    found.push({ x: LEFT + (from - view[0]) * scale, width: Math.max((to - from) * scale, 1), bar });
  }
  return found;
}

/** `marked` is the step whose bars stand out, as text; null: the cursor's. */
export function draw(model, view, width, hatch, marked = null) {
  const x = (ms) => LEFT + ((ms - view[0]) * (width - LEFT - RIGHT)) / (view[1] - view[0]);
  const height = GROUP * model.runners.length + 18;
  const shapes = ticks(view, width).map((ms) => [
    svg("line", { x1: x(ms), x2: x(ms), y1: HEAD, y2: height - 16, class: "rs-line" }),
    // Half of a label in the middle of the last line would lie outside the picture.
    text(x(ms), height - 3, `${ms} ms`, { "text-anchor": x(ms) > width - EDGE ? "end" : "middle" }),
  ]);
  model.runners.forEach((runner, i) => shapes.push(lanes(model, runner, i * GROUP, view, width, x, hatch, marked)));
  const label = `Timeline, ${model.note}. ${model.runners.map((runner) => `${runner.title}: ${runner.summary}`).join(". ")}`;
  return svg("svg", { width, height, role: "img", "aria-label": label },
    svg("defs", {}, svg("pattern", { id: hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "rs-hatch" }))),
    shapes);
}

function lanes(model, runner, top, view, width, x, hatch, marked) {
  const lane = (index) => top + HEAD + index * LANE;
  const bottom = lane(3);
  const shapes = [
    text(0, top + 13, runner.title, { class: "", "font-size": 13, "font-weight": 700 }),
    text(LEFT, top + 13, runner.summary, { class: "", "font-size": 12 }),
    model.lanes.map((name, i) => text(LEFT - 8, lane(i) + 13, name, { "text-anchor": "end" })),
    model.lanes.map((_, i) => {
      const y = lane(i) + LANE - 1.5;
      return svg("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, class: "rs-line" });
    }),
    stepMarks(runner.steps, model.step, view, x).map((mark) => stepMark(mark, top, bottom)),
  ];
  for (const [begin, length] of runner.bubbles) {
    for (const { x: left, width: wide } of place([[1, "", begin, length]], view, width)) {
      shapes.push(svg("rect", { x: left, y: lane(1) + 1, width: wide, height: LANE - 4, fill: `url(#${hatch})` },
        title(`${runner.title}: bubble, the device idles ${length.toFixed(2)} ms`)));
    }
  }
  for (const placed of place(runner.bars, view, width)) shapes.push(bar(placed, runner.title, lane(placed.bar[0]), model, marked));
  for (const [at, length] of runner.pauses) {
    if (at < view[0] || at > view[1]) continue;
    shapes.push(svg("g", {},
      svg("path", { d: `M${x(at) - 2} ${top + HEAD - 4}V${bottom}m4 0V${top + HEAD - 4}`, class: "rs-pause" }),
      text(x(at), bottom + 8, "paused", { "text-anchor": "middle", "font-size": 9 }),
      title(`the session stood still here; ${length.toFixed(1)} ms taken out`)));
  }
  return svg("g", {}, shapes);
}

/** Where steps begin. A number that would run into the one after it is left out; the cursor's never is. */
export function stepMarks(steps, cursor, view, x) {
  const marks = [];
  let next = Infinity;
  for (const [step, begin] of [...steps].reverse()) {
    if (begin < view[0] || begin > view[1]) continue;
    const label = step === cursor ? `step ${step}` : String(step);
    const fits = step === cursor || x(begin) + 6 + label.length * 6 < next;
    if (fits) next = x(begin);
    marks.push({ x: x(begin), label: fits ? label : "", strong: step === cursor });
  }
  return marks;
}

function stepMark({ x, label, strong }, top, bottom) {
  return svg("g", {},
    svg("line", { x1: x, x2: x, y1: top + HEAD - 10, y2: bottom - 2, class: strong ? "rs-line-strong" : "rs-line" }),
    text(x + 3, top + HEAD - 4, label, { "font-size": 10, ...(strong ? { class: "", "font-weight": 700 } : {}) }));
}

const WHAT = { wait: "the host waits, inside the step", fetch: "the host fetches an output, outside the step" };

function bar({ x, width, bar: [lane, name, begin, length, step, kind, depth] }, runner, y, model, marked) {
  const inset = Math.min(depth, 2) * 2.5;
  const height = LANE - 4 - 2 * inset;
  const what = WHAT[kind] ?? model.lanes[lane];
  const label = kind === "around" ? "" : fitting(kind === "wait" && width > 60 ? `wait: ${name}` : name, width);
  const when = `${length.toFixed(3)} ms, from ${begin.toFixed(3)} to ${(begin + length).toFixed(3)}`;
  const faint = String(step) === (marked ?? String(model.step)) ? "" : marked ? " rs-dim" : " rs-pale";
  const look = `rs-label ${kind === "fetch" ? "rs-quiet" : faint ? "rs-on-mixed" : "rs-on-color"}`;
  return [
    svg("rect", {
      "data-step": step, x, y: y + 1 + inset, width: Math.max(width - 0.6, 0.8), height, rx: 2,
      class: `rs-${kind in WHAT ? kind : model.lanes[lane]}${faint}`,
    }, title(`${runner}, step ${step}: ${name}\n${what}\n${when}`)),
    label ? text(x + width / 2, y + LANE / 2 + 2, label, { "text-anchor": "middle", "font-size": 10, class: look }) : null,
  ];
}

function text(x, y, said, attributes) {
  return svg("text", { x, y, "font-size": 11, class: "rs-quiet", ...attributes }, said);
}

/** The timeline's own state: which stretch is in view and how wide the page is, with the listeners for both. */
class Timeline {
  constructor() {
    this.hatch = `rs-hatch-${++serial}`;
    this.model = null;
    this.view = null;
    this.width = 1360;
    this.frame = 0;
    this.gone = new AbortController();
    this.dragging = new AbortController();
    // Made once and kept over redraws, so that listeners neither pile up nor get lost.
    this.holder = make(el("div", { class: "rs-holder", tabindex: 0 }));
    this.drawn = [];
    this.marked = null;
    this.controls = this.buttons();
    this.listen();
    this.watcher = new ResizeObserver(() => this.fit());
    this.watcher.observe(this.holder);
  }

  show(model) {
    const chosen = this.view && !same(this.view, this.model.view) ? this.view[1] - this.view[0] : null;
    this.model = model.runners ? model : null;
    if (!this.model) return [];
    // A chosen zoom stays while stepping; its stretch follows the cursor.
    this.view = chosen === null ? model.view : shifted([model.view[1] - chosen], chosen, 0, model.extent);
    this.paint();
    return [el("div", { class: "rs-bar" }, heading("timeline", model.note), legend(), this.controls), this.holder];
  }

  /** Follows the width of the page; a view that is not on the page yet has none. */
  fit() {
    const width = this.holder.clientWidth;
    if (!width || Math.abs(width - this.width) < 2) return;
    this.width = width;
    this.paint();
  }

  paint() {
    if (!this.model) return;
    const now = [draw(this.model, this.view, this.width, this.hatch, this.marked)];
    patch(this.holder, this.drawn, now);
    this.drawn = now;
  }

  /** At most one repaint a frame, however fast the wheel turns. */
  look(view) {
    this.view = view;
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.paint();
    });
  }

  zoom(factor, at = 0.5) {
    this.look(zoomed(this.view, factor, at, this.model.extent));
  }

  pan(fraction) {
    const length = this.view[1] - this.view[0];
    this.look(shifted(this.view, length, length * fraction, this.model.extent));
  }

  reset() {
    this.look(this.model.view);
  }

  on(node, event, listener, options) {
    node.addEventListener(event, listener, { signal: this.gone.signal, ...options });
  }

  listen() {
    this.on(this.holder, "wheel", (event) => this.wheel(event), { passive: false });
    this.on(this.holder, "keydown", (event) => this.key(event));
    this.on(this.holder, "dblclick", () => this.reset());
    this.on(this.holder, "pointerdown", (event) => this.drag(event));
    this.on(this.holder, "pointerover", (event) => this.mark(event.target.getAttribute("data-step")));
    this.on(this.holder, "pointerleave", () => this.mark(null));
  }

  /** A plain wheel is the page's: it scrolls. */
  wheel(event) {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey) {
      const at = (event.clientX - this.holder.getBoundingClientRect().left - LEFT) / (this.width - LEFT - RIGHT);
      this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, Math.min(Math.max(at, 0), 1));
    } else if (sideways) {
      this.pan(sideways / this.width);
    } else {
      return;
    }
    event.preventDefault();
  }

  key(event) {
    if (event.key === "+" || event.key === "=") this.zoom(1 / 1.5);
    else if (event.key === "-") this.zoom(1.5);
    else if (event.key === "0") this.reset();
    else if (event.shiftKey && event.key === "ArrowLeft") this.pan(-0.25);
    else if (event.shiftKey && event.key === "ArrowRight") this.pan(0.25);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  drag(down) {
    if (down.button !== 0) return;
    const start = this.view;
    const scale = (start[1] - start[0]) / (this.width - LEFT - RIGHT);
    this.dragging.abort();
    this.dragging = new AbortController();
    const { signal } = this.dragging;
    const move = (event) => {
      this.look(shifted(start, start[1] - start[0], (down.clientX - event.clientX) * scale, this.model.extent));
    };
    this.on(window, "pointermove", move, { signal });
    for (const end of ["pointerup", "pointercancel"]) this.on(window, end, () => this.dragging.abort(), { signal });
  }

  /** Brings out the bars of one step, in both runners; without a step, those of the cursor's. */
  mark(step) {
    if (step === this.marked) return;
    this.marked = step;
    this.paint();
  }

  buttons() {
    const button = (said, help, act) => {
      const node = make(el("button", { type: "button", title: help, "aria-label": help }, said));
      this.on(node, "click", act);
      return node;
    };
    return make(el("div", { class: "rs-buttons" },
      button("◀", "earlier (drag, or Shift ←)", () => this.pan(-0.25)),
      button("▶", "later (drag, or Shift →)", () => this.pan(0.25)),
      button("+", "zoom in (Ctrl wheel, or +)", () => this.zoom(1 / 1.5)),
      button("−", "zoom out (Ctrl wheel, or -)", () => this.zoom(1.5)),
      button("last steps", "back to the last steps (double click, or 0)", () => this.reset()),
      button("all", "all steps kept here", () => this.look(this.model.extent))));
  }

  drop() {
    this.gone.abort();
    this.dragging.abort();
    this.watcher.disconnect();
    cancelAnimationFrame(this.frame);
  }
}

function legend() {
  const item = (look, said) => el("span", {}, el("span", { class: `rs-swatch rs-swatch-${look}` }), said);
  return el("div", { class: "rs-legend rs-quiet" }, item("wait", "host waits in the step"),
    item("fetch", "host fetches an output, outside"), item("bubble", "bubble: the device idles"));
}

function same(a, b) {
  return a[0] === b[0] && a[1] === b[1];
}

export default {
  render(context) {
    const timeline = new Timeline();
    const unmount = mount(context, "timeline", (model) => timeline.show(model), { own: true });
    return () => {
      timeline.drop();
      unmount();
    };
  },
};
