import assert from "node:assert/strict";
import { test } from "node:test";
import { Element, listenersOf, loadModule, models, render } from "./dom.mjs";

const { el, mount, patch, svg, unpack } = await loadModule("common");
const VIEWS = ["tokens", "state_rows", "step_inputs", "block_tables"];

test("texts and attributes go in as they are, nothing for what is not there", () => {
  const node = el("p", { class: "a", title: null, hidden: true, id: false }, "<b>", 0, null, false, [el("i"), [svg("g")]]);
  assert.equal(node.textContent, "<b>0");
  assert.deepEqual(node.getAttributeNames(), ["class", "hidden"]);
  assert.deepEqual(node.children.map((child) => child.tagName), ["i", "g"]);
});

test("a patched tree equals the fresh one and keeps the nodes that can stay", () => {
  const parent = new Element("div");
  const fold = el("details", { class: "x" }, el("summary", {}, "more"));
  patch(parent, [el("p", { class: "a", title: "t" }, "one", el("b", {}, "1")), fold, el("p", {}, "last"), el("hr")]);
  const [first, , third] = parent.children;
  fold.setAttribute("open", "");
  const fresh = () => [el("p", { class: "b" }, "two", el("i", {}, "1"), "end"), el("details", { class: "y" }, el("summary", {}, "less")), el("p", {}, "last")];
  patch(parent, fresh());
  const wanted = new Element("div");
  wanted.append(...fresh());
  assert.equal(parent.children[0], first);
  assert.equal(parent.children[2], third);
  assert.ok(fold.hasAttribute("open"), "what a reader unfolded stays open");
  fold.removeAttribute("open");
  assert.ok(parent.isEqualNode(wanted));
});

for (const name of VIEWS) {
  test(`${name}: going from one step to another and back draws what drawing it afresh does`, async () => {
    const module = await loadModule(name);
    const { root, model } = render(module, models[name].small);
    const small = render(module, models[name].small).root;
    const many = render(module, models[name].many).root;
    model.change("model", models[name].many);
    assert.ok(root.isEqualNode(many));
    model.change("model", models[name].small);
    assert.ok(root.isEqualNode(small));
    assert.equal(listenersOf(root) - root.listeners.length, 0, "patched nodes carry no listeners of their own");
  });
}

test("a view model travels as JSON in a buffer", () => {
  const bytes = new TextEncoder().encode('{"a":"é"}');
  assert.deepEqual(unpack(new DataView(bytes.buffer)), { a: "é" });
  assert.deepEqual(unpack({ a: 1 }), { a: 1 });
});

test("focus that would be lost goes to the dashboard", () => {
  const home = new Element("div");
  home.setAttribute("class", "rs-dashboard");
  const parent = home.appendChild(new Element("div"));
  const handlers = [];
  const values = { model: "p", selected: "" };
  const model = { get: (name) => values[name], on: (event, handler) => handlers.push([event, handler]), off() {} };
  mount({ model, el: parent }, "x", (tag) => el(tag, { tabindex: 0 }));
  const inner = parent.children[0].children[0];
  let active = null; // as in a browser, a node that leaves the page loses the focus
  Object.defineProperty(document, "activeElement", { get: () => (home.contains(active) ? active : null), set: (node) => (active = node) });
  inner.focus();
  const change = (tag) => {
    values.model = tag;
    handlers.find(([event]) => event === "change:model")[1]();
  };
  change("p");
  assert.equal(document.activeElement, inner);
  change("section");
  assert.equal(document.activeElement, home);
});
