// Of the acceptance view, what confidences said and what happened: a diagram for each stage, and a table.
import { el, svg, title } from "./dom.js";

const [SIDE, STRIP, GAP, MARGIN] = [168, 36, 8, 8];

function stage({ name, points, bars, ece }) {
  const most = Math.max(...bars);
  const [step, foot] = [SIDE / bars.length, SIDE + GAP + STRIP];
  const dots = points.map(([said, happened, count]) =>
    svg("circle", { cx: (SIDE * said).toFixed(1), cy: (SIDE * (1 - happened)).toFixed(1), r: (2 + 4 * Math.sqrt(count / most)).toFixed(1) },
      title(`said ${said.toFixed(3)}, happened ${happened.toFixed(3)}, ${count} prefixes`)));
  const counts = bars.map((count, i) => count ?
    svg("rect", { class: "rs-count", x: (i * step + 0.5).toFixed(1), y: (foot - (STRIP * count) / most).toFixed(1), width: (step - 1).toFixed(1), height: ((STRIP * count) / most).toFixed(1) },
      title(`${(i / bars.length).toFixed(2)} to ${((i + 1) / bars.length).toFixed(2)}: ${count} prefixes`)) : null);
  const [width, height] = [SIDE + 2 * MARGIN, foot + 2 * MARGIN];
  return el("div", {}, el("p", {}, `${name}: ECE ${ece.toFixed(3)}`),
    svg("svg", { viewBox: `${-MARGIN} ${-MARGIN} ${width} ${height}`, width, height, role: "img", "aria-label": `reliability of the confidences ${name}` },
      svg("rect", { width: SIDE, height: SIDE }), svg("line", { x1: 0, y1: SIDE, x2: SIDE, y2: 0 }), dots, counts,
      svg("line", { class: "rs-foot", x1: 0, y1: foot, x2: SIDE, y2: foot })),
    el("p", { class: "rs-quiet" }, `below: prefixes of each bin, at most ${most.toLocaleString("en-US")}`));
}

/** What `confidence_reliability` of reliability.py returns. */
export function reliability({ say, stages, head, rows, note }) {
  return el("div", { class: "rs-reliability" },
    el("p", { class: "rs-quiet" }, `confidence of a prefix → share accepted ↑; ${say}`),
    el("div", { class: "rs-parts" }, stages.map(stage),
      el("div", {},
        el("div", { class: "rs-scroll" }, el("table", { "aria-label": "confidences by position" },
          el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
          el("tbody", {}, rows.map((row) => el("tr", {}, row.map((text) => el("td", { class: "rs-number" }, text))))))),
        el("p", { class: "rs-quiet" }, note))));
}
