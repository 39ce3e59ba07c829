// The step inputs view: every token a column, every tensor a line, cut at the requests; who made each tensor stands beside it.
import { el, heading, mount } from "./common.js";

const pieces = (parts) => parts.map((text, i) => (text === "" ? null : i % 2 ? el("span", { class: "rs-sign" }, text) : text));

function band({ id, label, count, n, color, t }) {
  const attributes = { class: "rs-band", scope: "colgroup", colspan: n, title: t, style: color ? `border-bottom-color:${color}` : null };
  const owner = id ? { "data-request": id, tabindex: 0 } : {};
  return el("th", { ...attributes, ...owner }, label, count > 1 ? el("small", {}, ` ×${count}`) : null);
}

function cell({ v, n, t, k, r, first }) {
  const names = [k && `rs-${k}`, first && "rs-first", n > 1 && "rs-wide"].filter(Boolean).join(" ");
  return el("td", { class: names || null, colspan: n > 1 ? n : null, title: t || null, "data-request": r || null }, pieces(v));
}

const line = ({ name, t, cells }) =>
  el("tr", { class: name === "token" ? "rs-text" : null }, el("th", { scope: "row", title: t }, name), cells.map(cell));

function panel({ title, note, stale, bands, lines }) {
  const table = el("table", { class: "rs-tensors", "aria-label": `inputs of ${title}` },
    el("thead", {}, el("tr", {}, el("th", {}), bands.map(band))), el("tbody", {}, lines.map(line)));
  return el("section", { class: stale ? "rs-panel rs-stale" : "rs-panel" },
    el("h4", {}, title, el("small", {}, ` ${note}`)), lines.length ? el("div", { class: "rs-scroll" }, table) : null);
}

const PLACE = { host: "made by the host", compute: "made by the device" };

const breakable = (words) => words.split("_").map((part, i) => (i ? ["_", el("wbr"), part] : part));

const maker = ([lane, words]) =>
  el("td", {}, lane ? el("i", { style: `background:var(--rs-${lane})`, title: PLACE[lane] }) : null, breakable(words));

function makers({ runners, lines }) {
  if (!lines.length) return null;
  const rows = lines.map(([name, by]) => el("tr", {}, el("th", { scope: "row" }, name), by.map(maker)));
  return el("table", { class: "rs-made" },
    el("thead", {}, el("tr", {}, ["made by", ...runners].map((text) => el("th", { scope: "col" }, text)))), el("tbody", {}, rows));
}

export const draw = ({ panels = [], made = { runners: [], lines: [] } }) => [
  heading("step inputs"),
  el("div", { class: "rs-beside" }, el("div", { class: "rs-panels" }, panels.map(panel)), makers(made)),
];

export default { render: (context) => mount(context, "step_inputs", draw) };
