// The verification budget against the load: how many drafts a step verifies, of how many, and what decided it.
import { mount } from "./common.js";
import { el, heading, svg, title } from "./dom.js";

const [WIDE, HIGH] = [300, 120];
const [LEFT, TOP, RIGHT, FOOT] = [60, 10, 12, 20];
const LEGENDS = {
  shares: "drafts verified of a request, by requests running: mean, least and most; dashed: all there are",
  costs: "measured cost of a step, by its tokens; dots: sizes that were chosen, the newest filled",
  loads: "means by load; expected and came: tokens, where confidences were known",
  steps: "the newest steps; ms: what a step costs with no drafts, with the chosen ones, with all",
};
const along = (value, most) => ((WIDE * value) / most).toFixed(1);
const up = (value, most) => (HIGH * (1 - value / most)).toFixed(1);

function table(name, { head, rows }) {
  return el("div", {}, el("p", { class: "rs-quiet" }, LEGENDS[name]),
    el("div", { class: "rs-scroll" }, el("table", { "aria-label": LEGENDS[name] },
      el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((text) => el("td", {}, text))))))));
}

/** Marks over axes from 0 to what is written at their ends. */
function chart(name, marks, [across, upwards]) {
  const [width, height] = [LEFT + WIDE + RIGHT, TOP + HIGH + FOOT];
  const label = (text, x, y, anchor) => svg("text", { class: "rs-quiet", x, y, "text-anchor": anchor, "font-size": 11 }, text);
  return el("div", {}, el("p", { class: "rs-quiet", style: `max-width:${width}px` }, LEGENDS[name]),
    svg("svg", { class: `rs-${name}`, viewBox: `${-LEFT} ${-TOP} ${width} ${height}`, width, height, role: "img", "aria-label": LEGENDS[name] },
      svg("path", { class: "rs-axes", d: `M0 0V${HIGH}H${WIDE}` }), marks,
      label("0", -6, HIGH + 4, "end"), label(upwards, -6, 4, "end"),
      label("0", 0, HIGH + 15, "middle"), label(across, WIDE + RIGHT, HIGH + 15, "end")));
}

function shares({ points, most, max, ends }) {
  const marks = points.map(([load, mean, least, largest, steps]) => {
    const x = along(load, max);
    return [
      svg("line", { class: "rs-range", x1: x, y1: up(least, most), x2: x, y2: up(largest, most) }),
      svg("circle", { cx: x, cy: up(mean, most), r: 4 },
        title(`${load} requests: ${mean.toFixed(2)} drafts of a request, ${least.toFixed(2)} to ${largest.toFixed(2)}; ${steps} steps`)),
    ];
  });
  return chart("shares", [svg("line", { class: "rs-all", x1: 0, y1: 0, x2: WIDE, y2: 0 }), marks], ends);
}

function costs({ curves, chosen, max: [widest, highest], ends }) {
  const lines = curves.map(([size, points]) =>
    svg("polyline", { points: points.map(([x, y]) => `${along(x, widest)},${up(y, highest)}`).join(" ") }, title(`measured with ${size} requests`)));
  const dots = chosen.map(([tokens, ms, steps], i) =>
    svg("circle", { class: i === chosen.length - 1 ? "rs-newest" : null, cx: along(tokens, widest), cy: up(ms, highest), r: 4 },
      title(`${tokens} tokens: ${ms.toFixed(2)} ms, chosen in ${steps} steps`)));
  return chart("costs", [lines, dots], ends);
}

function panel(one) {
  return el("section", {},
    el("p", {}, el("b", {}, one.title), ` ${one.say}`),
    el("div", { class: "rs-parts" }, shares(one.shares), one.costs ? costs(one.costs) : null),
    el("div", { class: "rs-parts" }, table("loads", one.loads), table("steps", one.steps)));
}

export function draw({ note = "", panels = [] }) {
  return [heading("verification budget", note), panels.map(panel)];
}

export default { render: (context) => mount(context, "budget", draw) };
