import assert from "node:assert/strict";
import { test } from "node:test";
import { listenersOf, loadModule, models, render } from "./dom.mjs";

const inputs = await loadModule("step_inputs");

const lineOf = (root, name) =>
  root.querySelectorAll("tr").find((tr) => tr.querySelector("th")?.textContent === name).querySelectorAll("td").map((td) => td.textContent);

test("every token is a column, cut at the requests", () => {
  const { root } = render(inputs, models.step_inputs.small);
  assert.deepEqual(root.querySelectorAll(".rs-band").map((band) => band.textContent), ["A", "D", "C ×4"]);
  assert.deepEqual(lineOf(root, "positions"), ["7", "6", "4", "5", "6", "7"]);
  assert.deepEqual(lineOf(root, "query_start_loc"), ["0", "1", "2", "6"]);
  assert.deepEqual(lineOf(root, "seq_lens"), ["8", "7", "8"]);
  assert.equal(lineOf(root, "slot_mapping").length, 6);
});

test("the columns that a line spans add up to those of the tokens", () => {
  for (const model of [models.step_inputs.small, models.step_inputs.many]) {
    const { root } = render(inputs, model);
    for (const table of root.querySelectorAll("table.rs-tensors")) {
      const widths = table.querySelectorAll("tr").map((tr) =>
        tr.children.slice(1).filter((td) => !td.classList.contains("rs-end")).reduce((sum, td) => sum + Number(td.getAttribute("colspan") ?? 1), 0));
      assert.equal(new Set(widths).size, 1, `columns ${widths}`);
    }
  }
});

test("who made each tensor stands by runner", () => {
  const { root } = render(inputs, models.step_inputs.small);
  const made = root.querySelector("table.rs-made");
  assert.deepEqual(lineOf(made, "input_ids"), ["host loop, then one copy", "kernels 2 and 4"]);
  assert.equal(made.querySelector("i").getAttribute("title"), "made by the host");
});

test("a request's cells mark together, and the cleanup leaves nothing behind", () => {
  const { root, model, cleanup } = render(inputs, models.step_inputs.small);
  root.querySelectorAll("td").find((td) => td.getAttribute("data-request") === "C").dispatch("pointerover");
  assert.equal(model.values.selected, "C");
  model.change("selected", "A");
  const chosen = root.querySelectorAll(".rs-chosen").map((node) => node.getAttribute("data-request"));
  assert.ok(chosen.length >= 7);
  assert.deepEqual([...new Set(chosen)], ["A"]);
  cleanup();
  assert.equal(listenersOf(root), 0);
  assert.equal(model.handlers.length, 0);
});

test("before the first step it says so", () => {
  const { root } = render(inputs, { panels: [{ title: "V2", note: "no inputs yet: no step has run", bands: [], lines: [], stale: false }], made: { runners: [], lines: [] } });
  assert.match(root.textContent, /no inputs yet/);
  assert.equal(root.querySelectorAll("table").length, 0);
});
