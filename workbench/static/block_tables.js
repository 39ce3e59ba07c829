// Block tables, live. Positions and wording come from views/block_tables.py; views/block_tables_figure.py draws the same
// picture without a browser.
import { mount } from "./common.js";
import { el, heading, svg, title } from "./dom.js";

const CHANGES = { new: "+", hit: "✓", evicted: "!", freed: "×" };
const NOBODY = "#999999";

export function draw(model) {
  const panels = (model.panels ?? []).map((panel) =>
    el("section", {}, heading(panel.title, panel.note),
      el("div", { class: "rs-pictures" }, el("div", { class: "rs-scroll" }, tables(panel)), pool(panel))));
  return [el("div", { class: "rs-panels" }, panels), el("div", { class: "rs-legend rs-quiet" }, model.legend)];
}

export function tables(panel) {
  const { layout, gathered, rows } = panel;
  const places = new Map(rows.map((row, i) => [row.row, i]));
  const caption = panel.runner === "v1" ? "persistent = input" : "persistent (fixed rows)";
  const shapes = [text(layout.left, 12, caption)];
  rows.forEach((row, i) => shapes.push(row.request === null ? freeRow(layout, i, row) : ownedRow(panel, i, row)));
  if (gathered.length) {
    shapes.push(text(layout.index + 17, 12, "idx_mapping", { "text-anchor": "middle" }));
    shapes.push(text(layout.gathered, 12, panel.gathered_now ? "gathered" : "gathered (last step)"));
  }
  for (const row of gathered) shapes.push(gatheredRow(panel, row, places.get(row.row)));
  return picture(layout.width, layout.height, `${panel.title}: ${panel.note}`, shapes);
}

export function pool(panel) {
  const { cells, columns, size, free_next: next, num_free: free } = panel.pool;
  const top = 36;
  const bottom = top + Math.ceil(cells.length / columns) * size;
  const small = size < 18;
  const groups = new Map();
  const single = [];
  cells.forEach((cell, i) => {
    const x = (i % columns) * size;
    const y = top + Math.floor(i / columns) * size;
    if (small && !cell.change && GROUPED.has(cell.state)) gather(groups, cell, square(x + 0.5, y + 0.5, size - 2, size - 2));
    else single.push(blockCell(cell, x, y, size, panel.colors));
  });
  const list = next.map(([id, cached], i) => {
    const x = 50 + i * 24;
    return [svg("rect", { x, y: bottom + 24, width: 22, height: 17, rx: 3, class: cached ? CACHED : FREE }),
      number(x + 11, bottom + 36, id, { "font-size": 10 })];
  });
  // What comes and goes with every step stands last, so that the others keep their places.
  return picture(Math.max(columns * size, 206), bottom + 48, `${panel.pool.title}: ${panel.pool.summary}`, [
    text(0, 12, panel.pool.title), text(0, 28, panel.pool.summary), text(0, bottom + 16, panel.pool.cache), text(0, bottom + 36, "free list"),
    small ? [...new Set([...KEPT, ...Object.keys(panel.colors), ...groups.keys()])].map((kind) => cellGroup(kind, groups.get(kind), panel.colors)) : null,
    list, free > next.length ? text(53 + next.length * 24, bottom + 36, `+${free - next.length}`) : null, single,
  ]);
}

const FREE = "rs-free";
const CACHED = "rs-cached-free";

/** Small blocks of one owner, or of none, that did not change share one path: a pool of 512 must still draw at once. */
const GROUPED = new Set(["used", "free", "cached"]);

const KEPT = [" free", " cached"]; // no request's id begins with a space

function gather(groups, cell, path) {
  const kind = cell.owners?.[0] ?? ` ${cell.state}`;
  const group = groups.get(kind) ?? { ids: [], d: "" };
  group.ids.push(cell.id);
  group.d += path;
  groups.set(kind, group);
}

/** One path for the blocks of a kind: a request, or free ones. It is there without any too, so that it stays the same node. */
function cellGroup(kind, group, colors) {
  const said = { " free": "free", " cached": "free, still in the prefix cache" }[kind] ?? kind;
  const paint = KEPT.includes(kind) ? { class: kind === " cached" ? CACHED : FREE } : { fill: colors[kind] ?? NOBODY, "data-request": kind };
  return svg("path", { d: group?.d ?? "", ...paint }, title(`${said}: blocks ${group?.ids.join(" ") ?? "none"}`));
}

function ownedRow(panel, i, row) {
  const { layout } = panel;
  const y = layout.top + i * layout.row;
  const middle = y + layout.row / 2;
  const color = panel.colors[row.request] ?? NOBODY;
  const end = layout.left + row.blocks.length * layout.chip + 6;
  return svg("g", { "data-request": row.request, tabindex: 0 },
    title(describe(row)),
    hitArea(0, y, layout.left + layout.table, layout.row),
    number(28, middle + 4, row.label, { "text-anchor": "end", class: row.label === String(row.row) ? "rs-mono rs-quiet" : "rs-mono" }),
    svg("rect", { x: 33, y: y + 1, width: 6, height: layout.row - 3, fill: color }),
    text(43, middle + 4, row.request.slice(0, 3), { class: "" }),
    blocks(layout, layout.left, y, row.blocks, color),
    row.said ? text(end, middle + 4, row.said, { "font-size": 10 }) : null);
}

function freeRow(layout, i, row) {
  const y = layout.top + i * layout.row;
  const middle = y + layout.row / 2 + 3.5;
  const said = row.to > row.row ? `rows ${row.row} to ${row.to} free` : row.left ? `free, ${row.left} left` : "free";
  return svg("g", {},
    number(28, middle, row.row, { "text-anchor": "end", class: "rs-mono rs-quiet" }),
    svg("rect", {
      x: layout.left + 0.5, y: y + 2.5, width: layout.table - 1, height: layout.row - 5, rx: 3, fill: "none",
      stroke: NOBODY, "stroke-dasharray": "3 3",
    }),
    text(layout.left + layout.table / 2, middle, said, { "text-anchor": "middle", "font-size": layout.small ? 9 : 10 }));
}

function gatheredRow(panel, row, source) {
  const { layout } = panel;
  const color = panel.colors[row.request] ?? NOBODY;
  const y = layout.top + row.position * layout.row;
  const middle = y + layout.row / 2;
  const x = layout.index;
  const size = layout.small ? 9 : 11;
  return svg("g", { "data-request": row.request },
    title(describe(row)),
    source === undefined ? null : curve(panel, source, middle, color),
    svg("rect", { x, y: y + 1, width: 34, height: layout.row - 3, rx: 3, fill: color, "fill-opacity": 0.2, stroke: color }),
    number(x + 17, middle + 4, row.row, { "font-size": size }),
    svg("path", { d: `M${x + 37} ${middle}H${x + 48}`, stroke: color, "stroke-width": 1.5 }),
    svg("path", { d: `M${x + 47} ${middle - 4}l7 4l-7 4z`, fill: color }),
    number(layout.gathered - 6, middle + 4, row.position, { "text-anchor": "end", "font-size": size, class: "rs-mono rs-quiet" }),
    blocks(layout, layout.gathered, y, row.blocks, color));
}

/** From the end of a persistent row to its batch position. */
function curve({ layout, rows }, source, middle, color) {
  const from = layout.left + (rows[source].blocks?.length ?? 0) * layout.chip + 6;
  const start = layout.top + source * layout.row + layout.row / 2;
  const bend = (layout.index + from) / 2;
  return svg("path", {
    d: `M${from} ${start}C${bend} ${start} ${bend} ${middle} ${layout.index - 3} ${middle}`,
    fill: "none", stroke: color, "stroke-width": layout.small ? 1 : 1.8,
  });
}

/** The blocks of a row. Those that look alike share one path: 64 rows of them must still draw at once. */
function blocks(layout, x, y, list, color) {
  const { chip, small } = layout;
  const middle = y + layout.row / 2;
  const groups = new Map();
  const above = [];
  list.forEach(([id, marks], i) => {
    const left = x + i * chip;
    if (id === null) {
      above.push(text(left + chip / 2, middle + 3.5, small ? "…" : marks, { "text-anchor": "middle", "font-size": 9 }));
      return;
    }
    const look = marks.includes("x") ? "stale" : marks.includes("s") ? "shared" : "plain";
    groups.set(look, (groups.get(look) ?? "") + square(left + 0.5, y + 1.5, chip - 2, layout.row - (small ? 3 : 5)));
    if (!small) above.push(number(left + chip / 2 - 0.5, middle + 3, id, { class: look === "stale" ? "rs-mono rs-quiet" : "rs-mono" }));
    const fresh = marks.includes("n");
    const hit = marks.includes("h");
    if (fresh || (hit && !small)) above.push(badge(left + chip - 4, y + (small ? 9 : 7), hit ? "✓" : "+", fresh));
  });
  const paths = [...groups].map(([look, d]) => svg("path", {
    d, fill: color, "fill-opacity": look === "stale" ? 0 : small ? 0.8 : 0.2, "stroke-linejoin": "round",
    stroke: { stale: NOBODY, shared: "var(--rs-ink)", plain: color }[look],
    "stroke-width": small ? 0.9 : look === "shared" ? 1.8 : 1.2, "stroke-dasharray": look === "stale" ? "2 2" : null,
  }));
  return [paths, above];
}

function square(x, y, width, height) {
  return `M${x} ${y}h${width}v${height}h${-width}z`;
}

function blockCell(cell, x, y, size, colors) {
  const inner = size - 2;
  const owners = (cell.owners ?? []).map((owner) => colors[owner] ?? NOBODY);
  const box = { x: x + 0.5, y: y + 0.5, width: inner, height: inner, rx: 2 };
  const plain = { null: "rs-null", free: FREE, cached: CACHED }[cell.state];
  const parts = [svg("rect", plain ? { ...box, class: plain } : { ...box, fill: owners[0] })];
  if (owners.length > 1) {
    parts.push(svg("rect", { ...box, x: box.x + inner / 2, width: inner / 2, rx: 0, fill: owners[1] }));
    parts.push(svg("rect", { ...box, class: "rs-outline", "stroke-width": size >= 18 ? 1.8 : 1 }));
  }
  if (size >= 18) {
    const said = cell.state === "null" ? "∅" : cell.id;
    const look = { "font-size": 9, class: plain ? "rs-mono rs-quiet" : "rs-mono rs-halo" };
    parts.push(number(x + size / 2 - 0.5, y + size / 2 + 3, said, look));
  }
  if (cell.change) {
    const [bx, by] = size >= 18 ? [x + size - 4, y + 7] : [x + size / 2 - 0.5, y + size / 2 + 3];
    parts.push(badge(bx, by, CHANGES[cell.change], true));
  }
  return svg("g", { "data-request": cell.owners ? cell.owners.join(" ") : null }, title(cell.title), parts);
}

/** The tooltip of a row. */
export function describe(row) {
  const list = row.blocks.map(([id]) => (id === null ? "…" : id)).join(" ");
  const place = row.position === undefined ? `row ${row.row}` : `batch position ${row.position} reads row ${row.row}`;
  return `${row.request}, ${place}: ${row.total} blocks ${list}`;
}

function badge(x, y, glyph, loud) {
  return text(x, y, glyph, { "text-anchor": "middle", "font-size": 10, class: `rs-halo rs-badge${loud ? "" : " rs-quiet"}` });
}

/** A see-through area, so that the pointer meets a row between its blocks too. */
function hitArea(x, y, width, height) {
  return svg("rect", { x, y, width, height, fill: "transparent" });
}

function number(x, y, said, attributes) {
  return text(x, y, said, { "text-anchor": "middle", class: "rs-mono", ...attributes });
}

function text(x, y, said, attributes) {
  return svg("text", { x, y, "font-size": 11, class: "rs-quiet", ...attributes }, said);
}

function picture(width, height, label, shapes) {
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, title(label), shapes);
}

export default {
  render(context) {
    return mount(context, "block-tables", draw);
  },
};
