// The state rows view: V1's dense rows with arrows for the rows that moved, V2's fixed rows, changed cells marked.
import { mount } from "./common.js";
import { cut, el, heading, lazy, pieces, svg, title } from "./dom.js";

const ROW = 22; // height of a row in pixels, as in state_rows.css
const PADDING = 10; // of a cell, both sides together
const TOKEN = 12; // a token's text is cut here, in characters; its tooltip has all of it
const HEAD = 10; // characters of a column's name that stand on one line
const STRETCH = 8; // rows that come into sight and leave it together

const breakable = (key) => key.split("_").map((part, i, all) => (i < all.length - 1 ? [`${part}_`, el("wbr")] : part));

const head = (key, where, tip) =>
  el("th", { scope: "col", role: "columnheader", title: tip }, el("div", {}, breakable(key)), el("small", {}, where));

const cell = ({ v, c, t }) => el("td", { role: "cell", class: c ? "rs-changed" : null, title: t || null }, pieces(cut(v, TOKEN)));

function row(one) {
  const number = el("th", { scope: "row", role: "rowheader" }, one.row);
  if (one.kind !== "used") return el("tr", { class: "rs-free", role: "row" }, number, el("td", { role: "cell" }, one.note));
  const who = el("td", { role: "cell", class: one.changed ? "rs-who rs-changed" : "rs-who", title: one.note || null },
    el("i", { style: `background:${one.color}` }), one.id);
  const attributes = { class: one.dim ? "rs-dim" : null, role: "row", "data-request": one.id, tabindex: 0 };
  return el("tr", attributes, number, who, one.cells.map(cell));
}

/** How many characters of the table's own font a text takes; those of East Asia take two. */
function columnsOf(text) {
  let columns = 0;
  for (const char of text) columns += char >= "\u1100" ? 2 : 1;
  return columns;
}

/**
 * The style that gives each column its width: from its longest word or value up to the whole of its name, where there is room.
 * Given widths make every row a world of its own, so that a changed cell costs the layout of one row; the browser's own way to
 * find them is to look at every cell again.
 */
export function widths({ columns, rows }) {
  const used = rows.filter((one) => one.kind === "used");
  const longest = (texts, least) => texts.reduce((most, text) => Math.max(most, columnsOf(text)), least);
  // The head is set in a smaller, proportional font: so much of a character of the table's own is one of its.
  const ofHead = ({ key, where }, line) => Math.max(longest(key.split("_").map((part) => `${part}_`), 0) * 0.8, line * 0.87, where.length * 0.68);
  const cells = columns.map((_, i) => Math.min(longest(used.map((one) => one.cells[i].v.join("")), 3), TOKEN));
  const of = (line) => columns.map((column, i) => Math.max(cells[i], ofHead(column, line(column))));
  const named = [longest(rows.map((one) => one.row), 2.4), Math.max(longest(used.map((one) => one.id), 0) + 2, 6.1)];
  const least = [...named, ...of(() => 0)];
  const most = [...named, ...of(({ key }) => Math.min(key.length, HEAD))];
  const size = (wide, count = 1) => `calc(${Math.round(wide * 100) / 100}ch + ${count * PADDING}px)`;
  const sum = (list) => size(list.reduce((all, wide) => all + wide, 0), list.length);
  const tracks = least.map((wide, i) => `minmax(${size(wide)},${size(most[i])})`).join(" ");
  return `--rs-columns:${tracks};min-width:${sum(least)};width:${sum(most)}`;
}

/** The path of a move between two displayed rows, bending further out the later its lane, and where its heads point. */
export function arrow({ src, dst, how }, lane) {
  const [a, b] = [ROW * (src + 0.5), ROW * (dst + 0.5)];
  const out = 26 + 9 * lane;
  return { d: `M8 ${a} C${out} ${a} ${out} ${b} 8 ${b}`, heads: how === "swap" ? [b, a] : [b] };
}

function arrows({ moves, rows }) {
  if (!moves.length) return null;
  const [width, height] = [26 + 9 * moves.length, ROW * rows.length];
  const drawn = moves.map((move, lane) => {
    const { d, heads } = arrow(move, lane);
    return svg("g", { "data-request": move.ids }, title(move.t),
      svg("path", { d, fill: "none", stroke: move.color, "stroke-width": 2 }),
      heads.map((y) => svg("path", { d: `M2 ${y} l8 -4.5 v9 z`, fill: move.color })));
  });
  const label = moves.map((move) => move.t).join("; ");
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, drawn);
}

function stretches(rows) {
  const parts = [];
  for (let i = 0; i < rows.length; i += STRETCH) parts.push(rows.slice(i, i + STRETCH));
  return parts;
}

function panel(one) {
  const columns = [head("row", "", "row number"), head("request", "", "the request in this row")];
  const table = el("table", { role: "table", "aria-label": one.title, style: widths(one) },
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, columns, one.columns.map(({ key, where, title: tip }) => head(key, where, tip)))),
    stretches(one.rows).map((rows) => lazy(el("tbody", { role: "rowgroup", style: `height:${ROW * rows.length}px` }, rows.map(row)))));
  return el("section", { class: "rs-panel" }, heading(one.title, one.note), el("div", { class: "rs-scroll" }, table, arrows(one)));
}

export const draw = ({ panels = [] }) => panels.map(panel);

export default { render: (context) => mount(context, "state_rows", draw) };
