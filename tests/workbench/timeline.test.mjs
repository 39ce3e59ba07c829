import assert from "node:assert/strict";
import { setMaxListeners } from "node:events";
import { test } from "node:test";
import { Element, listenersOf, loadModule, models, render } from "./dom.mjs";

setMaxListeners(50); // one signal drops all listeners of a view
const observers = [];
globalThis.ResizeObserver = class {
  constructor(callback) {
    this.callback = callback;
    observers.push(this);
  }
  observe(node) {
    this.node = node;
  }
  disconnect() {
    this.node = null;
  }
};
globalThis.requestAnimationFrame = (paint) => (paint(), 0);
globalThis.cancelAnimationFrame = () => {};
globalThis.window = new Element("window");
Element.prototype.getBoundingClientRect = () => ({ left: 0 });

const view = await loadModule("timeline");
const small = models.timeline.small;
const bars = (root) => root.querySelectorAll("[data-step]");
const axis = (root) => root.querySelectorAll("text").map((n) => n.textContent).filter((t) => /^-?[\d.]+ ms$/.test(t)).map(parseFloat);
const stopped = () => {
  const event = { prevented: 0, preventDefault: () => (event.prevented += 1), stopPropagation: () => {} };
  return event;
};

test("zoom keeps the point under the pointer, and stays within the extent", () => {
  assert.deepEqual(view.zoomed([0, 100], 0.5, 0.25, [0, 100]), [12.5, 62.5]);
  assert.deepEqual(view.zoomed([0, 50], 4, 0.5, [-10, 100]), [-10, 100]);
  assert.deepEqual(view.zoomed([0, 10], 2, 0, [0, 100]), [0, 20]);
  const [from, to] = view.zoomed([0, 0.06], 0.1, 0.5, [0, 100]);
  assert.ok(Math.abs(to - from - 0.05) < 1e-9, "it stops at 50 microseconds");
});

test("a shift stops at the ends", () => {
  assert.deepEqual(view.shifted([20, 30], 10, -50, [0, 100]), [0, 10]);
  assert.deepEqual(view.shifted([20, 30], 10, 500, [0, 100]), [90, 100]);
});

test("ticks are round and about 110 px apart", () => {
  assert.deepEqual(view.ticks([0, 40], 1320), [0, 5, 10, 15, 20, 25, 30, 35, 40]);
  assert.deepEqual(view.ticks([-0.35, 0.25], 660), [-0.3, -0.2, -0.1, 0, 0.1, 0.2]);
});

test("a label is whole, cut, or left out", () => {
  assert.equal(view.fitting("forward", 60), "forward");
  assert.equal(view.fitting("prepare inputs", 52), "prepare…");
  assert.equal(view.fitting("forward", 20), "");
});

test("a bar lies where it was measured; what is out of view is not drawn", () => {
  const at = (begin, length) => [1, "x", begin, length, 1, "span", 0];
  const [one, two] = view.place([at(10, 20), at(45, 20), at(60, 5)], [0, 50], 572);
  assert.deepEqual([one.x, one.width], [162, 200]);
  assert.deepEqual([two.x, two.width], [512, 50]);
  assert.equal(view.place([at(60, 5)], [0, 50], 572).length, 0);
});

test("numbers of steps that would run into each other are left out, the cursor's never", () => {
  const marks = view.stepMarks([[1, 0], [2, 40], [3, 44], [4, 46], [5, 120]], 4, [0, 100], (ms) => ms);
  assert.deepEqual(marks.map((mark) => mark.label), ["step 4", "", "", "1"]);
});

test("every bar in the first view is drawn, waits in their own look", () => {
  const { root } = render(view, small);
  const expected = small.runners.flatMap((runner) => view.place(runner.bars, small.view, 1360));
  assert.equal(bars(root).length, expected.length);
  const waits = expected.filter(({ bar }) => bar[5] === "wait").length;
  assert.ok(waits > 0);
  assert.equal(root.querySelectorAll("rect.rs-wait").length, waits);
  assert.match(root.querySelector("svg").getAttribute("aria-label"), /V1: .* ms a step.*V2: .*no host wait inside a step/);
  assert.ok(root.querySelectorAll("title").some((n) => /bubble, the device idles [\d.]+ ms/.test(n.textContent)));
});

test("the keys, the buttons and the wheel move the view; a plain wheel is left to the page", () => {
  const { root } = render(view, small);
  const holder = root.querySelector(".rs-holder");
  const all = bars(root).length;
  for (let i = 0; i < 8; i++) holder.dispatch("keydown", { key: "+", ...stopped() });
  assert.ok(bars(root).length < all);
  holder.dispatch("keydown", { key: "0", ...stopped() });
  assert.equal(bars(root).length, all);
  const scroll = stopped();
  holder.dispatch("wheel", { deltaX: 0, deltaY: 100, ...scroll });
  assert.equal(scroll.prevented, 0);
  holder.dispatch("wheel", { deltaX: 0, deltaY: -100, ctrlKey: true, clientX: 700, ...scroll });
  holder.dispatch("wheel", { deltaX: 0, deltaY: -100, ctrlKey: true, clientX: 700, ...scroll });
  const step = stopped();
  holder.dispatch("keydown", { key: "ArrowRight", shiftKey: false, ...step });
  assert.equal(step.prevented, 0, "a plain arrow is the dashboard's");
  root.querySelectorAll("button").at(-1).dispatch("click");
  assert.equal(bars(root).length, small.runners.flatMap((r) => view.place(r.bars, small.extent, 1360)).length);
});

test("a chosen zoom stays while stepping and follows the newest step", () => {
  const { root, model } = render(view, small);
  const holder = root.querySelector(".rs-holder");
  const shown = () => axis(root);
  for (let i = 0; i < 4; i++) holder.dispatch("keydown", { key: "+", ...stopped() });
  const zoomed = shown();
  const longer = { ...small, view: [0, small.view[1] + 30], extent: [0, small.view[1] + 30] };
  model.change("model", longer);
  assert.ok(Math.abs(shown().at(-1) - shown()[0] - (zoomed.at(-1) - zoomed[0])) <= 2 * (zoomed[1] - zoomed[0]));
  assert.ok(shown()[0] > zoomed[0]);
});

test("dragging pans, and lets go of the window", () => {
  const { root } = render(view, small);
  const holder = root.querySelector(".rs-holder");
  for (let i = 0; i < 4; i++) holder.dispatch("keydown", { key: "+", ...stopped() });
  const before = axis(root);
  holder.dispatch("pointerdown", { button: 0, clientX: 400 });
  window.dispatch("pointermove", { clientX: -300 });
  assert.ok(axis(root)[0] > before[0]);
  window.dispatch("pointerup");
  assert.equal(window.listeners.length, 0);
});

test("pointing at a bar brings out its step in both runners", () => {
  const { root } = render(view, small);
  const step = bars(root)[0].getAttribute("data-step");
  bars(root)[0].dispatch("pointerover");
  const loud = (rect) => !rect.classList.contains("rs-pale") && !rect.classList.contains("rs-dim");
  for (const rect of bars(root)) assert.equal(loud(rect), rect.getAttribute("data-step") === step);
  root.querySelector(".rs-holder").dispatch("pointerleave");
  for (const rect of bars(root)) assert.equal(loud(rect), rect.getAttribute("data-step") === String(small.step));
});

test("only the label of a bar in its full colour has an ink of its own", () => {
  const { root } = render(view, small);
  const said = new Map(bars(root).map((rect) => [rect, rect.nextElementSibling ?? rect.parentNode.children[rect.parentNode.children.indexOf(rect) + 1]]));
  let seen = 0;
  for (const [rect, label] of said) {
    if (!label?.classList.contains("rs-label") || label.classList.contains("rs-quiet")) continue;
    assert.equal(label.classList.contains("rs-on-mixed"), rect.classList.contains("rs-pale"));
    seen += 1;
  }
  assert.ok(seen > 1);
});

test("no label of the axis leaves the picture", () => {
  const { root } = render(view, { ...small, view: [0, 10141.5], extent: [0, 10141.5] });
  const holder = root.querySelector(".rs-holder");
  for (holder.clientWidth = 300; holder.clientWidth < 1500; holder.clientWidth += 3) {
    observers.at(-1).callback();
    for (const node of root.querySelectorAll("text").filter((n) => /^[\d.]+ ms$/.test(n.textContent))) {
      const half = node.getAttribute("text-anchor") === "middle" ? node.textContent.length * 3.1 : 0;
      const right = Number(node.getAttribute("x")) + half;
      assert.ok(right <= holder.clientWidth, `${node.textContent} ends at ${right} of ${holder.clientWidth}`);
    }
  }
});

test("it follows the width of the page", () => {
  const { root } = render(view, small);
  const holder = root.querySelector(".rs-holder");
  holder.clientWidth = 700;
  observers.at(-1).callback();
  assert.equal(root.querySelector("svg").getAttribute("width"), "700");
});

test("nothing is drawn before there is a step, and the cleanup leaves nothing behind", () => {
  const { root, model, parent, cleanup } = render(view, {});
  assert.equal(root.querySelectorAll("svg").length, 0);
  model.change("model", models.timeline.many);
  assert.equal(root.querySelectorAll("svg").length, 1);
  root.querySelector(".rs-holder").dispatch("pointerdown", { button: 0, clientX: 400 });
  const nodes = [root, ...root.all()];
  cleanup();
  assert.equal(nodes.reduce((sum, n) => sum + n.listeners.length, 0), 0);
  assert.equal(listenersOf(parent) + model.handlers.length + window.listeners.length, 0);
  assert.equal(observers.at(-1).node, null);
});
