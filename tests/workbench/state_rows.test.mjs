import assert from "node:assert/strict";
import { test } from "node:test";
import { listenersOf, loadModule, models, render } from "./dom.mjs";

const rows = await loadModule("state_rows");

test("V1 and V2 stand side by side, with V2's free rows", () => {
  const { root } = render(rows, models.state_rows.small);
  const [v1, v2] = root.querySelectorAll(".rs-panel");
  assert.match(v1.textContent, /^V1 persistent batch/);
  assert.match(v2.textContent, /^V2 state table/);
  const owners = (panel) => panel.querySelectorAll("[data-request]").filter((n) => n.tagName === "tr").map((n) => n.getAttribute("data-request"));
  assert.deepEqual(owners(v1), ["A", "D", "C"]);
  assert.deepEqual(owners(v2), ["A", "C", "D"]);
  assert.equal(v2.querySelectorAll("tr.rs-free").length, 3);
});

test("a changed cell is marked and says what it was", () => {
  const { root } = render(rows, models.state_rows.small);
  const changed = root.querySelectorAll("td.rs-changed").map((node) => node.getAttribute("title"));
  assert.ok(changed.some((tip) => tip === "num_tokens: 8 → 9"), changed.join("\n"));
  assert.ok(changed.some((tip) => tip?.includes("(the row held B)")));
});

test("a move is an arrow from its row to the hole; a swap has a head at both ends", () => {
  assert.deepEqual(rows.arrow({ src: 2, dst: 1, how: "condense" }, 0), { d: "M8 55 C26 55 26 33 8 33", heads: [33] });
  assert.deepEqual(rows.arrow({ src: 0, dst: 3, how: "swap" }, 1).heads, [77, 11]);
  const { root } = render(rows, models.state_rows.small);
  const [v1, v2] = root.querySelectorAll(".rs-panel");
  assert.equal(v1.querySelector("svg").getAttribute("aria-label"), "condense: D from row 2 to row 1");
  assert.equal(v1.querySelector("svg").querySelectorAll("path").length, 2);
  assert.equal(v1.querySelector("title").textContent, "condense: D from row 2 to row 1");
  assert.equal(v2.querySelector("svg"), null);
});

test("64 rows are drawn, and the cleanup leaves nothing behind", () => {
  const { root, model, cleanup } = render(rows, models.state_rows.small);
  model.change("model", models.state_rows.many);
  assert.ok(root.querySelectorAll("tr").length > 120);
  cleanup();
  assert.equal(listenersOf(root), 0);
  assert.equal(model.handlers.length, 0);
});

test("a column is as wide as its longest word or value needs, and a long token is cut in the cell, not in its tooltip", () => {
  const text = "extraordinarily";
  const cells = [{ v: ["12345"], c: false, t: "" }, { v: [text], c: true, t: `last_token: a → ${text}` }];
  const columns = [{ key: "num_tokens", where: "host", title: "" }, { key: "last_token", where: "host", title: "" }];
  const panel = { title: "V1", note: "", columns, rows: [{ row: "0", kind: "used", id: "A", color: "#000", cells }], moves: [] };
  const tracks = [...rows.widths(panel).matchAll(/minmax\(calc\(([\d.]+)ch \+ 10px\),calc\(([\d.]+)ch/g)].map(([, least, most]) => [Number(least), Number(most)]);
  assert.equal(tracks.length, 4);
  assert.ok(tracks.every(([least, most]) => least <= most));
  assert.deepEqual(tracks[2], [5.6, 8.7], "tokens_ is its longest word");
  assert.deepEqual(tracks[3], [12, 12]);
  const { root } = render(rows, { panels: [panel] });
  assert.equal(root.querySelectorAll("td").at(-1).textContent, "extraordina…");
  assert.ok(root.querySelectorAll("td").at(-1).getAttribute("title").endsWith(text));
});
