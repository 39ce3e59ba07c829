// The acceptance view: the drafts of each block and what became of them, and numbers of all of them.
import { mount } from "./common.js";
import { el, heading, pieces } from "./dom.js";
import { reliability } from "./reliability.js";

const OUTCOMES = ["accepted", "rejected", "dropped", "corrected", "bonus"];
const percent = (share) => `${(100 * share).toFixed(0)} %`;

const head = (names) => el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name))));

const table = (label, names, rows) =>
  el("div", { class: "rs-scroll" }, el("table", { "aria-label": label }, head(names), el("tbody", {}, rows)));

function token({ k, p, v, t }) {
  const numbers = v.map(([name, value]) => el("div", {}, el("span", { class: "rs-quiet" }, name), ` ${value}`));
  return el("td", { class: `rs-token rs-${k}`, title: t }, el("div", { class: "rs-piece" }, pieces(p)),
    el("div", { class: "rs-values" }, numbers.length ? numbers : el("div", {}, k)));
}

function block({ at, step, n, cells }) {
  return el("tr", {}, el("td", { class: "rs-number", title: `came in step ${step}` }, at), el("td", { class: "rs-number" }, n), cells.map(token));
}

const share = (value) =>
  value === null ? el("td", { class: "rs-number" }, "–")
    : el("td", { class: "rs-number rs-share", style: `--w:${(100 * value).toFixed(1)}%` }, percent(value));

function position({ k, c, a, of }) {
  const [stand, reached, number] = of;
  return el("tr", {}, el("td", { class: "rs-number" }, k), share(c), share(a),
    el("td", { class: "rs-number", title: `${stand} stand; ${reached} had all before them accepted; ${number} drafts in all` }, `${stand} / ${reached} / ${number}`));
}

function over({ steps, rows, totals }) {
  const names = steps.map(([first, last]) => (first === last ? first : `${first}–${last}`));
  const lines = rows.map(([length, counts]) =>
    el("tr", {}, el("td", { class: "rs-number" }, length), counts.map((count, i) =>
      el("td", { class: "rs-number rs-heat", style: `--w:${((100 * count) / Math.max(totals[i], 1)).toFixed(1)}%` }, count || ""))));
  return el("div", {}, el("p", { class: "rs-quiet" }, "blocks by accepted length, in each stretch of steps"),
    table("accepted lengths over time", ["accepted", ...names, "all"], lines));
}

function panel(one) {
  return el("section", { class: "rs-panel" },
    el("p", {}, el("b", {}, one.title), ` ${one.rule}: ${one.say}`),
    one.synthetic ? el("p", { class: "rs-synthetic", role: "note" }, one.synthetic) : null,
    el("div", { class: "rs-parts" },
      el("div", { class: "rs-blocks" }, one.more ? el("p", { class: "rs-quiet" }, one.more) : null,
        table(`blocks of ${one.title}`, ["position", "accepted", "block"], one.blocks.map(block))),
      el("div", { class: "rs-numbers" },
        el("div", {}, el("p", { class: "rs-quiet" }, "acceptance of the k-th draft: of those reached, and of all"),
          table(`acceptance by position of ${one.title}`, ["k", "conditional", "prefix", "stand / reached / all"], one.positions.map(position))),
        over(one.history))),
    one.reliability ? reliability(one.reliability) : null);
}

function choices(requests) {
  return el("div", { role: "group", "aria-label": "request", class: "rs-choose" }, requests.map(([id, color, chosen]) =>
    el("button", { type: "button", "data-request": id, "data-value": id, "aria-pressed": String(chosen), style: `border-left-color:${color}` }, id)));
}

export function draw({ open = false, note = "", requests = [], panels = [] }) {
  const hint = open ? "steps no longer trace what becomes of drafts" : "from the next step on, traces what becomes of each draft";
  return [
    el("div", { class: "rs-top" },
      heading("acceptance", open ? note : "what becomes of drafts"),
      el("button", { type: "button", "data-set": "watching", "data-value": open ? "" : "1", "aria-expanded": String(open), title: hint }, open ? "hide" : "show")),
    panels.length ? [
      requests.length > 1 ? choices(requests) : null,
      el("div", { class: "rs-legend" }, OUTCOMES.map((kind) => el("span", { class: `rs-token rs-${kind}` }, kind))),
      panels.map(panel),
    ] : null,
  ];
}

function render(context) {
  const { model } = context;
  const drop = mount(context, "acceptance", draw);
  const root = context.el.querySelectorAll(".rs-acceptance")[0];
  const click = (event) => {
    const target = event.target.closest("[data-value]");
    if (!target) return;
    const value = target.getAttribute("data-value");
    if (target.getAttribute("data-set") === "watching") model.set("watching", value === "1");
    else model.set("request", value);
    model.save_changes();
  };
  root.addEventListener("click", click);
  return () => {
    root.removeEventListener("click", click);
    drop();
  };
}

export default { render };
