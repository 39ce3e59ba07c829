// The state rows view: V1's dense rows with arrows for the rows that moved, V2's fixed rows, changed cells marked.
import { el, svg, title, heading, mount } from "./common.js";

const ROW = 22; // height of a row in pixels, as in state_rows.css

const breakable = (key) => key.split("_").map((part, i, all) => (i < all.length - 1 ? [`${part}_`, el("wbr")] : part));

const head = (key, where, tip) => el("th", { scope: "col", title: tip }, el("div", {}, breakable(key)), el("small", {}, where));

const pieces = (parts) => parts.map((text, i) => (text === "" ? null : i % 2 ? el("span", { class: "rs-sign" }, text) : text));

const cell = ({ v, c, t }) => el("td", { class: c ? "rs-changed" : null, title: t || null }, pieces(v));

function row(one, columns) {
  const number = el("th", { scope: "row" }, one.row);
  if (one.kind !== "used") return el("tr", { class: "rs-free" }, number, el("td", { colspan: columns + 1 }, one.note));
  const who = el("td", { class: one.changed ? "rs-who rs-changed" : "rs-who", title: one.note || null },
    el("i", { style: `background:${one.color}` }), one.id);
  const attributes = { class: one.dim ? "rs-dim" : null, "data-request": one.id, tabindex: 0 };
  return el("tr", attributes, number, who, one.cells.map(cell));
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

function panel(one) {
  const columns = [head("row", "", "row number"), head("request", "", "the request in this row")];
  const table = el("table", { "aria-label": one.title },
    el("thead", {}, el("tr", {}, columns, one.columns.map(({ key, where, title: tip }) => head(key, where, tip)))),
    el("tbody", {}, one.rows.map((each) => row(each, one.columns.length))));
  return el("section", { class: "rs-panel" }, heading(one.title, one.note), el("div", { class: "rs-scroll" }, table, arrows(one)));
}

export const draw = ({ panels = [] }) => panels.map(panel);

export default { render: (context) => mount(context, "state_rows", draw) };
