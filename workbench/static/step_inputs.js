// The step inputs view: every token a column, every tensor a line, cut at the requests; who made each tensor stands beside it.
import { mount } from "./common.js";
import { cut, el, heading, lazy, pieces } from "./dom.js";

const ROW = 22; // height of a line in pixels, as in step_inputs.css
const PADDING = 10; // of a cell, both sides together
const TEXT = 9; // a token's text is cut here, in characters; its tooltip has all of it

/**
 * The lines of a panel, cut at its bands: for each request, for the padding, and for what goes beyond them, the cells of each
 * line. A cell's `n` says how many columns it spans.
 */
export function groups({ bands, lines }) {
  const rest = lines.map(({ cells }) => [...cells]);
  const take = (cells, columns) => {
    const own = [];
    for (let taken = 0; taken < columns && cells.length; taken += own.at(-1).n) own.push(cells.shift());
    return own;
  };
  const cut = bands.map((band) => ({ band, lines: rest.map((cells) => take(cells, band.n)) }));
  const beyond = rest.some((cells) => cells.length) ? [{ band: null, lines: rest }] : [];
  return [...cut, ...beyond];
}

/** The width of each column of a group in characters of its font. */
function widths({ band, lines }, names) {
  const wide = new Array(band ? band.n : 1).fill(2);
  lines.forEach((cells, at) => {
    let column = 0;
    for (const { v, n } of cells) {
      const length = v.reduce((sum, text) => sum + text.length, 0);
      if (n === 1) wide[column] = Math.max(wide[column], names[at] === "token" ? Math.min(length, TEXT) : length);
      column += n;
    }
  });
  const label = band ? `${band.label}${band.count > 1 ? ` ×${band.count}` : ""}`.length : 0;
  wide[wide.length - 1] += Math.max(0, label - wide.reduce((sum, each) => sum + each, 0));
  return wide.map((each) => 2 * Math.ceil(each / 2)); // coarse, so that a step seldom moves what stands beside it
}

function cell({ v, n, t, k, first }, name) {
  const names = [k && `rs-${k}`, first && n > 1 && "rs-wide"].filter(Boolean).join(" ");
  return el("td", { class: names || null, colspan: n > 1 ? n : null, title: t || null }, pieces(name === "token" ? cut(v, TEXT) : v));
}

/** A request's columns, a small table of given size: what changes in it moves nothing outside, and out of sight it costs nothing. */
function group(one, names) {
  const wide = widths(one, names);
  const { band } = one;
  const size = `width:calc(${wide.reduce((sum, each) => sum + each, 0)}ch + ${wide.length * PADDING + 1}px);height:${ROW * (names.length + 1)}px`;
  const owner = band?.id ? { "data-request": band.id, tabindex: 0 } : {};
  const columns = wide.map((each) => el("col", { style: `width:calc(${each}ch + ${PADDING}px)` }));
  const top = band
    ? el("th", { class: "rs-band", scope: "colgroup", colspan: band.n > 1 ? band.n : null, title: band.t, style: band.color ? `border-bottom-color:${band.color}` : null },
      band.label, band.count > 1 ? el("small", {}, ` ×${band.count}`) : null)
    : el("td", {});
  const rows = one.lines.map((cells, i) => el("tr", { class: names[i] === "token" ? "rs-text" : null, "aria-label": names[i] }, cells.length ? cells.map((each) => cell(each, names[i])) : el("td", {})));
  return lazy(el("div", { class: band ? "rs-group" : "rs-group rs-beyond", style: size, ...owner },
    el("table", { "aria-label": band ? band.t : "beyond the requests" },
      el("colgroup", {}, columns), el("thead", {}, el("tr", {}, top)), el("tbody", {}, rows))));
}

function panel({ title, note, stale, bands, lines }) {
  const names = lines.map(({ name }) => name);
  const first = el("table", { class: "rs-names", "aria-hidden": "true" },
    el("tbody", {}, el("tr", {}, el("th", {})), lines.map(({ name, t }) => el("tr", {}, el("th", { title: t }, name)))));
  const tensors = el("div", { class: "rs-tensors", role: "group", "aria-label": `inputs of ${title}` },
    first, groups({ bands, lines }).map((one) => group(one, names)));
  return el("section", { class: stale ? "rs-panel rs-stale" : "rs-panel" },
    el("h4", {}, title, el("small", {}, ` ${note}`)), lines.length ? el("div", { class: "rs-scroll" }, tensors) : null);
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
