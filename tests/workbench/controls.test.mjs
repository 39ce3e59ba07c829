import assert from "node:assert/strict";
import { test } from "node:test";
import { Element, fakeModel, loadModule } from "./dom.mjs";

// What only the bar asks of a page: lists of selectors, keys of the whole document, frames.
const plain = Element.prototype.matches;
Element.prototype.matches = function (selector) {
  return selector.split(",").some((one) => plain.call(this, one.trim()));
};
Element.prototype.toggleAttribute = function (name, on = !this.hasAttribute(name)) {
  if (on) this.setAttribute(name, "");
  else this.removeAttribute(name);
};
const keys = new Element("document");
document.addEventListener = (type, listener) => keys.addEventListener(type, listener);
document.removeEventListener = (type, listener) => keys.removeEventListener(type, listener);
const frames = [];
globalThis.requestAnimationFrame = (callback) => frames.push(callback);
globalThis.cancelAnimationFrame = () => {};

const controls = await loadModule("controls");
const FORM = { prompts: "one\n<img src=x onerror=alert(1)>", runners: "both", block_size: 4, seed: null };
const STATE = {
  chip: ["<b>tiny</b>", "cpu"], loop: "plain", step: 3, steps: 5, phase: "whole step", finished: false, error: "", ack: 0, form: FORM,
  conditions: [["token", "a token"], ["finished", "a request finishes"]],
  waits: [{ runner: "V1", count: 2, text: "2 waits 1.5 ms", title: "why" }, { runner: "V2", count: 0, text: "0 waits", title: "" }],
};

function open(state = STATE) {
  const sent = [];
  const model = { ...fakeModel({ model: state }), send: (message) => sent.push(message) };
  const home = new Element("div");
  home.setAttribute("class", "rs-dashboard");
  const parent = new Element("div");
  home.appendChild(parent);
  const cleanup = controls.default.render({ model, el: parent });
  frames.splice(0).forEach((frame) => frame());
  const root = parent.children[0];
  const press = (key, target = home, more = {}) => {
    let stopped = false;
    keys.dispatch("keydown", { key, target, preventDefault: () => (stopped = true), stopPropagation() {}, ...more });
    return stopped;
  };
  const answer = (more = {}) => {
    model.change("model", { ...model.values.model, ack: sent.length, ...more });
    frames.splice(0).forEach((frame) => frame());
  };
  return { sent, model, home, parent, root, press, answer, cleanup };
}

test("the place, the waits and an error are told as text", () => {
  const { root, answer } = open();
  assert.equal(root.querySelector(".rs-place").textContent, "step 3 / 5 · whole step");
  assert.equal(root.querySelector(".rs-waits").textContent, "V1 2 waits 1.5 msV2 0 waits");
  assert.equal(root.querySelectorAll("span.rs-waiting").length, 1);
  assert.equal(root.querySelector(".rs-chip").textContent, "<b>tiny</b> · cpu · plain loop");
  answer({ error: "ConfigError: <img src=x>" });
  assert.equal(root.querySelector(".rs-error").textContent, "ConfigError: <img src=x>");
  assert.equal(root.querySelectorAll("img").length, 0);
});

test("buttons send commands, one at a time", () => {
  const { root, home, sent, answer } = open();
  const button = (command) => root.querySelectorAll("button").find((each) => each.getAttribute("data-command") === command);
  button("step").dispatch("click");
  button("step").dispatch("click");
  assert.deepEqual(sent, [{ command: "step", seq: 1 }], "the second click comes while the first is at work");
  assert.ok(root.classList.contains("rs-busy"));
  assert.ok(home.hasAttribute("data-rs-waiting"), "the views hold back until all of them can change at once");
  answer();
  assert.ok(!root.classList.contains("rs-busy"));
  assert.ok(!home.hasAttribute("data-rs-waiting"));
  button("run").dispatch("click");
  answer();
  button("until").dispatch("click");
  assert.deepEqual(sent.slice(1), [{ command: "run", seq: 2, n: 10 }, { command: "until", seq: 3, condition: "finished" }]);
});

test("keys do what the buttons say, within the dashboard and outside fields only", () => {
  const { sent, home, root, press, answer } = open();
  for (const key of ["ArrowRight", "ArrowLeft", "Home", "p", "P", "r", "u"]) {
    assert.ok(press(key), `${key} is ours`);
    answer();
  }
  assert.deepEqual(sent.map((each) => each.command), ["step", "back", "home", "phase", "phase", "run", "until"]);
  assert.ok(!press("x"), "an unknown key goes on to the browser");
  assert.ok(!press("ArrowRight", home, { ctrlKey: true }));
  assert.ok(!press("ArrowRight", new Element("div")), "a key elsewhere on the page is not ours");
  assert.ok(!press("r", root.querySelector("textarea")), "a letter typed into a field is a letter");
  assert.equal(sent.length, 7);
  assert.equal(home.getAttribute("tabindex"), "0");
  assert.equal(home.getAttribute("data-lm-suppress-shortcuts"), "true", "or JupyterLab would take the keys first");
});

test("every button shows its key and every shown key works", () => {
  const { root } = open();
  for (const { command, key } of controls.BUTTONS) {
    const button = root.querySelectorAll("button").find((each) => each.getAttribute("data-command") === command);
    assert.ok(button.textContent.includes(key));
    const name = { "←": "ArrowLeft", "→": "ArrowRight" }[key] ?? key;
    assert.equal(controls.commandOf({ key: name, target: root }), command);
  }
});

test("the form holds its edits until they are applied", () => {
  const { root, sent, press, answer } = open();
  const input = (name) => root.querySelectorAll("[name]").find((each) => each.getAttribute("name") === name);
  const apply = root.querySelector(".rs-apply");
  assert.equal(input("prompts").value, FORM.prompts);
  assert.equal(input("seed").value, "", "null is an empty field");
  input("block_size").value = "8";
  input("block_size").dispatch("input");
  assert.ok(apply.classList.contains("rs-primary"));
  answer({ step: 4 });
  assert.equal(input("block_size").value, "8", "a step elsewhere does not undo an edit");
  press("Enter", input("prompts"), { ctrlKey: true });
  assert.equal(sent[0].command, "apply");
  assert.equal(sent[0].form.block_size, "8");
  assert.equal(sent[0].form.prompts, FORM.prompts);
  answer({ form: { ...FORM, block_size: 8 } });
  assert.equal(input("block_size").value, "8");
});

test("S hides the form, and the cleanup leaves nothing behind", () => {
  const { root, parent, model, press, cleanup } = open();
  press("s");
  assert.ok(root.querySelector("form").hasAttribute("hidden"));
  press("s");
  assert.ok(!root.querySelector("form").hasAttribute("hidden"));
  const others = keys.listeners.length;
  cleanup();
  assert.equal(keys.listeners.length, others - 1);
  assert.equal(model.handlers.length, 0);
  assert.equal(parent.children.length, 0);
});
