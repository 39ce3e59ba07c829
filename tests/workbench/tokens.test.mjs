import assert from "node:assert/strict";
import { test } from "node:test";
import { listenersOf, loadModule, models, render } from "./dom.mjs";

const tokens = await loadModule("tokens");

test("each request is a line of its text, token by token", () => {
  const { root } = render(tokens, models.tokens.small);
  const lines = root.querySelectorAll(".rs-line");
  assert.deepEqual(lines.map((line) => line.getAttribute("data-request")), ["A", "B", "C", "D"]);
  const drawn = lines[0].querySelectorAll(".rs-token");
  assert.equal(drawn.length, models.tokens.small.requests[0].lines[0].tokens.length);
  assert.equal(drawn[0].textContent, "Why");
  assert.ok(drawn[0].classList.contains("rs-of-prompt"));
  assert.ok(drawn.at(-1).classList.contains("rs-new"));
});

test("a token that looks like markup is text", () => {
  const { root } = render(tokens, models.tokens.small);
  const evil = root.querySelectorAll(".rs-token").find((node) => node.textContent.includes("<img"));
  assert.equal(evil.textContent, "<img src=x onerror=alert(1)>");
  assert.equal(evil.children.length, 0);
  assert.equal(root.querySelectorAll("img").length, 0);
});

test("signs for what would not show stand apart from text that only looks alike", () => {
  const token = (p) => ({ k: "sampled", f: [], p, t: "" });
  const line = { runners: "", tokens: [token(["", "\\n"]), token(["\\n"])], notes: [], dim: false };
  const { root } = render(tokens, { requests: [{ id: "A", color: "#000", lines: [line] }], legend: [], why: [], note: "" });
  const [real, literal] = root.querySelectorAll(".rs-token");
  assert.equal(real.querySelectorAll(".rs-sign").length, 1);
  assert.equal(literal.querySelectorAll(".rs-sign").length, 0);
  assert.equal(real.textContent, literal.textContent);
});

test("a fold holds the tokens it hides", () => {
  const fold = { k: "fold", f: ["prompt"], p: ["12 more"], t: "hidden <b>text</b>" };
  const line = { runners: "V1", tokens: [fold], notes: [{ k: "prefill", text: "prefill 4 / 12", done: 1 / 3 }], dim: true };
  const { root } = render(tokens, { requests: [{ id: "A", color: "#000", lines: [line] }], legend: [], why: [], note: "" });
  const details = root.querySelector("details");
  assert.equal(details.querySelector("summary").textContent, "12 more");
  assert.equal(details.querySelector(".rs-token").textContent, "hidden <b>text</b>");
  assert.equal(root.querySelector("i").getAttribute("style"), "width:33%");
  assert.ok(root.querySelector(".rs-line").classList.contains("rs-dim"));
});

test("hovering a request selects it, focus does too, and a selection made elsewhere shows here", () => {
  const { root, model } = render(tokens, models.tokens.small);
  root.querySelectorAll(".rs-line")[2].querySelector(".rs-token").dispatch("pointerover");
  assert.equal(model.values.selected, "C");
  root.querySelectorAll(".rs-line")[1].dispatch("focusin");
  assert.equal(model.values.selected, "B");
  model.change("selected", "D");
  const chosen = root.querySelectorAll(".rs-line").filter((line) => line.classList.contains("rs-chosen"));
  assert.deepEqual(chosen.map((line) => line.getAttribute("data-request")), ["D"]);
});

test("a new step replaces the old one, and the cleanup leaves nothing behind", () => {
  const { parent, root, model, cleanup } = render(tokens, models.tokens.small);
  model.change("model", models.tokens.many);
  assert.equal(root.querySelectorAll(".rs-line").length, 64);
  assert.ok(listenersOf(root) > 0);
  cleanup();
  assert.equal(listenersOf(root), 0);
  assert.equal(model.handlers.length, 0);
  assert.equal(parent.children.length, 0);
});
