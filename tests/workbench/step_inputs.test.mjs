import assert from "node:assert/strict";
import { test } from "node:test";
import { listenersOf, loadModule, models, render } from "./dom.mjs";

const inputs = await loadModule("step_inputs");

const textsOf = (rows) => rows.flatMap((tr) => tr.querySelectorAll("td").map((td) => td.textContent));
/** A tensor's line, through all groups. */
const lineOf = (root, name) => textsOf(root.querySelectorAll("tr").filter((tr) => tr.getAttribute("aria-label") === name));

test("every token is a column, cut at the requests", () => {
  const { root } = render(inputs, models.step_inputs.small);
  assert.deepEqual(root.querySelectorAll(".rs-band").map((band) => band.textContent), ["A", "D", "C ×4"]);
  assert.deepEqual(lineOf(root, "positions"), ["7", "6", "4", "5", "6", "7", ""]);
  assert.deepEqual(lineOf(root, "query_start_loc"), ["0", "1", "2", "6"]);
  assert.deepEqual(lineOf(root, "seq_lens"), ["8", "7", "8", ""], "the last group holds only the end of query_start_loc");
  assert.deepEqual(lineOf(root, "positions").length, lineOf(root, "slot_mapping").length);
});

test("the columns that a line spans add up to those of the tokens", () => {
  for (const model of [models.step_inputs.small, models.step_inputs.many]) {
    const { root } = render(inputs, model);
    for (const group of root.querySelectorAll(".rs-group").filter((each) => !each.classList.contains("rs-beyond"))) {
      const widths = group.querySelectorAll("tr").map((tr) => tr.children.reduce((sum, cell) => sum + Number(cell.getAttribute("colspan") ?? 1), 0));
      assert.deepEqual([...new Set(widths)], [group.querySelectorAll("col").length], `columns ${widths}`);
    }
    const drawn = model.panels.flatMap((panel) => panel.lines.flatMap((line) => line.cells));
    const titles = (cells) => cells.filter(Boolean).sort();
    assert.deepEqual(
      titles(root.querySelectorAll("td").filter((td) => td.parentNode.hasAttribute("aria-label")).map((td) => td.getAttribute("title"))),
      titles(drawn.map((cell) => cell.t)), "no cell is lost");
  }
});

test("who made each tensor stands by runner", () => {
  const { root } = render(inputs, models.step_inputs.small);
  const made = root.querySelector("table.rs-made");
  assert.deepEqual(textsOf(made.querySelectorAll("tr").filter((tr) => tr.children[0].textContent === "input_ids")), ["host loop, then one copy", "kernels 2 and 4"]);
  assert.equal(made.querySelector("i").getAttribute("title"), "made by the host");
});

test("a request's cells mark together, and the cleanup leaves nothing behind", () => {
  const { root, model, cleanup } = render(inputs, models.step_inputs.small);
  const group = root.querySelectorAll(".rs-group").find((each) => each.getAttribute("data-request") === "C");
  assert.deepEqual(textsOf(group.querySelectorAll("tr").filter((tr) => tr.getAttribute("aria-label") === "positions")), ["4", "5", "6", "7"]);
  group.querySelectorAll("td")[0].dispatch("pointerover");
  assert.equal(model.values.selected, "C");
  model.change("selected", "A");
  const chosen = root.querySelectorAll(".rs-chosen").map((node) => node.getAttribute("data-request"));
  assert.deepEqual(chosen, ["A"]);
  cleanup();
  assert.equal(listenersOf(root), 0);
  assert.equal(model.handlers.length, 0);
});

test("before the first step it says so", () => {
  const { root } = render(inputs, { panels: [{ title: "V2", note: "no inputs yet: no step has run", bands: [], lines: [], stale: false }], made: { runners: [], lines: [] } });
  assert.match(root.textContent, /no inputs yet/);
  assert.equal(root.querySelectorAll("table").length, 0);
});
