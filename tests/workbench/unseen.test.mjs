import assert from "node:assert/strict";
import { test } from "node:test";
import { Element, fakeModel, listenersOf, loadModule } from "./dom.mjs";

// What a page has and this document lacks: frames, idle time, and an observer that tells what is in sight.
const queue = () => {
  const waiting = [];
  const add = (callback) => waiting.push(callback);
  const run = () => waiting.splice(0).forEach((callback) => callback());
  return { add, run };
};
const [frames, idle] = [queue(), queue()];
globalThis.requestAnimationFrame = frames.add;
globalThis.cancelAnimationFrame = () => {};
globalThis.requestIdleCallback = idle.add;
let watcher = null;
globalThis.IntersectionObserver = class {
  constructor(callback) {
    [this.callback, this.nodes, watcher] = [callback, new Set(), this];
  }
  observe(node) {
    this.nodes.add(node);
  }
  disconnect() {
    this.nodes.clear();
  }
  tell(target, isIntersecting) {
    this.callback([{ target, isIntersecting }]);
  }
};
Object.defineProperty(Element.prototype, "isConnected", { get() { return Boolean(this.parentNode); } });
const calm = () => {
  idle.run();
  frames.run();
};

const { mount } = await loadModule("common");
const { el, lazy } = await loadModule("dom");

/** A view of two lazy lines and a head, after its first frames. */
function open() {
  const model = fakeModel({ model: "a" });
  const draw = (value) => [el("h3", {}, value), ["1", "2"].map((i) => lazy(el("p", { title: value }, `${value}${i}`)))];
  const parent = new Element("div");
  const cleanup = mount({ model, el: parent }, "x", draw);
  calm();
  const root = parent.children[0];
  return { model, cleanup, root, texts: () => root.children.map((child) => child.textContent) };
}

test("lines out of sight change only once the page is idle", () => {
  const { model, root, texts } = open();
  const [, first, second] = root.children;
  assert.deepEqual([...watcher.nodes], [root, first, second]);
  watcher.tell(second, false);
  model.change("model", "b");
  frames.run();
  assert.deepEqual(texts(), ["b", "b1", "a2"]);
  assert.equal(second.getAttribute("title"), "b");
  assert.equal(root.getAttribute("aria-busy"), "true");
  calm();
  assert.deepEqual(texts(), ["b", "b1", "b2"]);
  assert.ok(!root.hasAttribute("aria-busy"));
});

test("a line that comes into sight is made good at once, over all the steps that it missed", () => {
  const { model, root, texts } = open();
  const second = root.children[2];
  watcher.tell(second, false);
  for (const value of ["b", "c"]) {
    model.change("model", value);
    frames.run();
  }
  assert.deepEqual(texts(), ["c", "c1", "a2"]);
  watcher.tell(second, true);
  assert.deepEqual(texts(), ["c", "c1", "c2"]);
});

test("a view out of sight is drawn once the page is idle, or when it comes into sight", () => {
  const { model, root, texts } = open();
  watcher.tell(root, false);
  model.change("model", "b");
  frames.run();
  assert.deepEqual(texts(), ["a", "a1", "a2"]);
  assert.equal(root.getAttribute("aria-busy"), "true");
  calm();
  assert.deepEqual(texts(), ["b", "b1", "b2"]);
  calm();
  assert.ok(!root.hasAttribute("aria-busy"));
  model.change("model", "c");
  frames.run();
  watcher.tell(root, true);
  assert.deepEqual(texts(), ["c", "c1", "c2"]);
});

test("a view that the browser skips waits until it comes nearer, and is not busy", () => {
  const { model, root, texts } = open();
  watcher.tell(root, false);
  root.dispatch("contentvisibilityautostatechange", { skipped: true });
  model.change("model", "b");
  frames.run();
  calm();
  assert.deepEqual(texts(), ["a", "a1", "a2"]);
  assert.ok(!root.hasAttribute("aria-busy"));
  root.dispatch("contentvisibilityautostatechange", { skipped: false });
  assert.deepEqual(texts(), ["b", "b1", "b2"]);
});

test("views hold back while a command is at work, then all change before one frame", () => {
  const home = new Element("div");
  home.setAttribute("data-rs-waiting", "");
  const { model, root, texts } = open();
  home.appendChild(root.parentNode);
  model.change("model", "b");
  frames.run();
  assert.deepEqual(texts(), ["a", "a1", "a2"]);
  home.removeAttribute("data-rs-waiting");
  home.dispatch("rs-done");
  frames.run();
  assert.deepEqual(texts(), ["b", "b1", "b2"]);
});

test("the cleanup leaves nothing that watches or listens, and what was put off is dropped", () => {
  const { model, root, cleanup, texts } = open();
  watcher.tell(root, false);
  model.change("model", "b");
  frames.run();
  cleanup();
  calm();
  assert.deepEqual(texts(), ["a", "a1", "a2"]);
  assert.equal(watcher.nodes.size + listenersOf(root) + model.handlers.length, 0);
});
