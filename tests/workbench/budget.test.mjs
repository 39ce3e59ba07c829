import assert from "node:assert/strict";
import { test } from "node:test";
import { listenersOf, loadModule, models, render } from "./dom.mjs";

const budget = await loadModule("budget");
const { small, unmeasured, closed } = models.budget;
const texts = (nodes) => nodes.map((node) => node.textContent);
const numbers = (node, ...names) => names.map((name) => Number(node.getAttribute(name)));

test("both tables have every cell", () => {
  const { root } = render(budget, small);
  const [panel] = small.panels;
  const tables = root.querySelectorAll("table");
  assert.equal(tables.length, 2);
  ["loads", "steps"].forEach((name, i) => {
    const lines = tables[i].querySelectorAll("tr").map((line) => texts(line.children));
    assert.deepEqual(lines, [panel[name].head, ...panel[name].rows]);
  });
  for (const text of [panel.title, panel.say]) assert.ok(root.textContent.includes(text));
});

test("a load's mark stands at its mean, between its least and its most", () => {
  const { root } = render(budget, small);
  const { points, most, max } = small.panels[0].shares;
  const chart = root.querySelector(".rs-shares");
  const [dots, ranges] = [chart.querySelectorAll("circle"), chart.querySelectorAll(".rs-range")];
  assert.equal(dots.length, points.length);
  points.forEach(([load, mean, least, largest], i) => {
    const [x, y] = numbers(dots[i], "cx", "cy");
    assert.ok(Math.abs(x - (300 * load) / max) < 0.06 && Math.abs(y - 120 * (1 - mean / most)) < 0.06);
    const [low, high] = numbers(ranges[i], "y1", "y2");
    assert.ok(Math.abs(low - 120 * (1 - least / most)) < 0.06 && Math.abs(high - 120 * (1 - largest / most)) < 0.06);
  });
});

test("the ends of the axes say how far they go, and of what", () => {
  const { root } = render(budget, small);
  for (const name of ["shares", "costs"]) {
    const [across, upwards] = small.panels[0][name].ends;
    assert.deepEqual(texts(root.querySelector(`.rs-${name}`).querySelectorAll("text")), ["0", upwards, "0", across]);
  }
});

test("costs are curves, chosen sizes dots, the newest is filled", () => {
  const { root, model } = render(budget, small);
  const { curves, chosen } = small.panels[0].costs;
  const chart = root.querySelector(".rs-costs");
  const lines = chart.querySelectorAll("polyline");
  assert.deepEqual(lines.map((line) => line.getAttribute("points").split(" ").length), curves.map(([, points]) => points.length));
  const dots = chart.querySelectorAll("circle");
  assert.equal(dots.length, chosen.length);
  assert.deepEqual(dots.map((dot) => dot.classList.contains("rs-newest")), chosen.map((_, i) => i === chosen.length - 1));
  model.change("model", unmeasured);
  assert.equal(root.querySelectorAll(".rs-costs").length, 0);
});

test("without a budget it is one line, and the cleanup leaves nothing behind", () => {
  const { parent, root, model, cleanup } = render(budget, closed);
  assert.equal(root.querySelectorAll("table").length, 0);
  assert.ok(root.textContent.includes(closed.note));
  model.change("model", small);
  assert.equal(root.querySelectorAll("section").length, 1);
  cleanup();
  assert.deepEqual([parent.children.length, model.handlers.length, listenersOf(root)], [0, 0, 0]);
});
