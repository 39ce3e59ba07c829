// The sampling view: how one token was drawn. Tokens are lines, stages columns; then the race of logit + noise.
import { mount } from "./common.js";
import { el, heading, pieces } from "./dom.js";

const percent = (share) => `${(100 * share).toFixed(1)}%`;

const button = (name, value, text, more) =>
  el("button", { type: "button", "data-set": name, "data-value": value, ...more }, text);

function option(value, chosen, classes, children, more) {
  const names = ["rs-option", chosen && "rs-on", ...classes].filter(Boolean).join(" ");
  return el("span", { role: "option", "aria-selected": String(chosen), "data-value": value, class: names, ...more }, children);
}

const list = (name, label, options) =>
  el("div", { role: "listbox", tabindex: 0, "data-list": name, "aria-label": label, title: "← and → choose", class: `rs-list rs-list-${name}` }, options);

function choices({ requests, before, tokens, pinned }) {
  const chips = requests.map(([id, color, chosen]) => option(id, chosen, [], id, { style: `border-color:${color}`, "data-request": id }));
  const color = requests.find(([, , chosen]) => chosen)?.[1];
  const drawn = tokens.map(({ p, t, at, chosen, differs }) => option(at, chosen, differs ? ["rs-differs"] : [], pieces(p), { title: t }));
  return el("div", { class: "rs-choose" },
    requests.length > 1 ? list("request", "request", chips) : null,
    el("div", { class: "rs-text", style: `border-color:${color}` }, el("span", { class: "rs-quiet" }, pieces(before)), list("position", "token", drawn)),
    pinned ? button("position", -1, "newest", { title: "follow the newest token again" }) : null);
}

function head({ names, left, cut, say, t }) {
  return el("th", { scope: "col", title: t, class: say ? "rs-cuts" : null, style: say ? `--kept:${percent(1 - cut)}` : null },
    names.map((name) => el("div", {}, name)), el("div", { class: "rs-quiet" }, left), say ? el("div", { class: "rs-lost" }, say) : null);
}

function cell({ k, w, p, x, d, t }) {
  if (k) return el("td", { class: `rs-${k}`, title: t }, k === "cut" ? "✕" : "·");
  const logit = el("span", { class: "rs-logit" }, x, d ? el("span", { class: "rs-delta" }, ` ${d}`) : null);
  return el("td", { class: "rs-p", style: `--w:${percent(w)}`, title: t }, el("div", {}, el("span", {}, p), logit));
}

/** Where a mark stands on its track: whole at both ends. */
const on = (share) => percent(0.08 + 0.84 * share);

function race(one) {
  if (!one) return [el("td", {}), el("td", {})];
  const [low, high] = [one.a, one.b].sort((x, y) => x - y);
  const style = `--a:${on(one.a)};--b:${on(one.b)};--low:${on(low)};--high:${on(high)}`;
  return [
    el("td", { class: one.win ? "rs-track rs-won" : "rs-track", style, title: one.t }),
    el("td", { class: "rs-number" }, one.n, " ", el("span", { class: one.win ? "rs-best" : "rs-quiet" }, one.s)),
  ];
}

function line({ p, t, win, cells, logprob, races }, cut) {
  const drawn = cells.map(cell);
  drawn.splice(cut, 0, logprob.map((text) => el("td", { class: "rs-number" }, text)));
  const mark = win.length ? el("small", { class: "rs-winner" }, ` ◀ ${win.join(" ")}`) : null;
  return el("tr", { class: win.length ? "rs-win" : null }, el("th", { scope: "row", title: t }, pieces(p), mark), drawn, races.map(race));
}

function panel({ title, stages, taken, races, lines, more, say }) {
  const heads = stages.map(head);
  const plain = (text) => el("th", { scope: "col", class: "rs-number" }, text);
  heads.splice(taken + 1, 0, plain("logprob"), plain("rank"));
  const tracks = races.map(([name, what]) => el("th", { scope: "colgroup", colspan: 2 }, name, el("div", { class: "rs-quiet" }, what)));
  return el("section", { class: "rs-panel" },
    el("div", { class: "rs-scroll" }, el("table", { "aria-label": `stages of the draw on ${title}` },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, title), heads, tracks)),
      el("tbody", {}, lines.map((one) => line(one, taken + 1))))),
    more ? el("p", { class: "rs-quiet" }, more) : null,
    say.map((text) => el("p", {}, text)));
}

export function draw({ open = false, note = "", requests = [], before = [], tokens = [], pinned = false, panels = [] }) {
  const hint = open ? "steps no longer trace how tokens are drawn" : "from the next step on, traces how each token is drawn; such a step takes longer";
  return [
    el("div", { class: "rs-top" },
      heading("sampling", open ? note : "how a token is drawn"),
      button("watching", open ? "" : "1", open ? "hide" : "show", { "aria-expanded": String(open), title: hint })),
    open && panels.length ? [choices({ requests, before, tokens, pinned }), panels.map(panel)] : null,
  ];
}

const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

function render(context) {
  const { model } = context;
  const drop = mount(context, "sampling", draw);
  const root = context.el.querySelectorAll(".rs-sampling")[0];
  const choose = (name, value) => {
    if (name === "watching") model.set("watching", value === "1");
    if (name === "request") model.set("request", value);
    if (name !== "watching") model.set("position", name === "position" ? Number(value) : -1);
    model.save_changes();
  };
  const click = (event) => {
    const target = event.target.closest("[data-value]");
    if (target) choose(target.getAttribute("data-set") ?? target.closest("[data-list]").getAttribute("data-list"), target.getAttribute("data-value"));
  };
  const key = (event) => {
    const by = STEPS[event.key];
    const around = event.target.closest("[data-list]");
    if (by === undefined || !around || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault(); // the bar would take the key for a step
    const options = [...around.querySelectorAll("[data-value]")];
    const at = options.findIndex((each) => each.getAttribute("aria-selected") === "true");
    const next = Math.min(Math.max(at + by, 0), options.length - 1);
    if (next !== at) choose(around.getAttribute("data-list"), options[next].getAttribute("data-value"));
  };
  root.addEventListener("click", click);
  root.addEventListener("keydown", key);
  return () => {
    root.removeEventListener("click", click);
    root.removeEventListener("keydown", key);
    drop();
  };
}

export default { render };
