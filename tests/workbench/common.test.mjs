import assert from "node:assert/strict";
import { test } from "node:test";
import { Element, listenersOf, loadModule, models, render } from "./dom.mjs";

const { mount, unpack } = await loadModule("common");
const { cut, el, lazy, make, patch, svg } = await loadModule("dom");
const VIEWS = ["tokens", "state_rows", "step_inputs", "block_tables"];

test("texts and attributes go in as they are, nothing for what is not there", () => {
  const node = make(el("p", { class: "a", title: null, hidden: true, id: false }, "<b>", 0, null, false, [el("i"), [svg("g")]]));
  assert.equal(node.textContent, "<b>0");
  assert.deepEqual(node.getAttributeNames(), ["class", "hidden"]);
  assert.deepEqual(node.children.map((child) => child.tagName), ["i", "g"]);
});

test("a patched tree equals the fresh one and keeps the nodes that can stay", () => {
  const parent = new Element("div");
  const own = new Element("canvas");
  const first = [el("p", { class: "a", title: "t" }, "one", el("b", {}, "1")), el("details", { class: "x" }, el("summary", {}, "more")), el("p", {}, "last"), own, el("hr")];
  patch(parent, [], first);
  const [one, fold, three] = parent.children;
  fold.setAttribute("open", "");
  const second = [el("p", { class: "b" }, "two", el("i", {}, "1"), "end"), el("details", { class: "y" }, el("summary", {}, "less")), el("p", {}, "last"), own];
  patch(parent, first, second);
  assert.equal(parent.children[0], one);
  assert.equal(parent.children[2], three);
  assert.equal(parent.children[3], own, "a node of one's own is put in as it is");
  assert.ok(fold.hasAttribute("open"), "what a reader unfolded stays open");
  fold.removeAttribute("open");
  const wanted = new Element("div");
  wanted.append(...second.map((each) => (each === own ? new Element("canvas") : make(each))));
  assert.ok(parent.isEqualNode(wanted));
});

test("a node is touched only where its description changed", () => {
  const parent = new Element("div");
  const list = (value) => [el("ul", { class: "x" }, [1, 2, 3].map((i) => el("li", { title: `${i}` }, i === 2 ? value : `${i}`)))];
  patch(parent, [], list("a"));
  let touched = 0;
  for (const node of [parent, ...parent.all()]) {
    for (const name of ["setAttribute", "removeAttribute", "appendChild", "replaceChild"]) {
      const plain = node[name];
      node[name] = (...given) => ((touched += 1), plain.apply(node, given));
    }
  }
  const text = parent.children[0].children[1].childNodes[0];
  patch(parent, list("a"), list("b"));
  assert.equal(touched, 0);
  assert.equal(text.data, "b");
});

test("what nobody sees is left as it is, until somebody does", () => {
  const parent = new Element("div");
  const rows = (value) => [1, 2].map((i) => lazy(el("p", { title: value }, `${value}${i}`)));
  patch(parent, [], rows("a"));
  const [seen, other] = parent.children;
  const kept = [];
  const unseen = { holds: (node) => node === other, keep: (...given) => kept.push(given) };
  patch(parent, rows("a"), rows("b"), unseen);
  assert.deepEqual([seen.textContent, other.textContent], ["b1", "a2"]);
  assert.equal(other.getAttribute("title"), "b", "who it is is said at once");
  assert.deepEqual(kept, [[other, ["a2"], ["b2"]]]);
});

test("a cut text keeps its signs and says that it goes on", () => {
  assert.deepEqual(cut(["abc", "\\n", "def"], 12), ["abc", "\\n", "def"]);
  assert.deepEqual(cut(["abc", "\\n", "defgh"], 8), ["abc", "\\n", "de…"]);
  assert.deepEqual(cut(["abcdef", "\\n", "x"], 4), ["abc…", "", ""]);
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
