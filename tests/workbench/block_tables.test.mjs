import assert from "node:assert/strict";
import { test } from "node:test";
import { listenersOf, loadModule, models, render } from "./dom.mjs";

const view = await loadModule("block_tables");
const small = models.block_tables.small;
const ofRequest = (root, id) => root.querySelectorAll("[data-request]").filter((n) => n.getAttribute("data-request").split(" ").includes(id));
const tip = (node) => node.querySelector("title").textContent;

test("V1 has one table, V2 the persistent rows, idx_mapping and the gathered rows", () => {
  const { root } = render(view, small);
  const [v1, v2] = root.querySelectorAll("section");
  assert.match(v1.textContent, /^V1 block table/);
  assert.match(v2.textContent, /idx_mapping/);
  assert.doesNotMatch(v1.textContent, /idx_mapping/);
  const rows = ofRequest(v2, "C").filter((n) => n.hasAttribute("tabindex"));
  assert.deepEqual(rows.map(tip), ["C, row 1: 2 blocks 1 7"]);
  assert.ok(ofRequest(v2, "C").some((n) => tip(n) === "C, batch position 2 reads row 1: 2 blocks 1 7"));
  assert.match(v2.textContent, /rows 3 to 5 free/);
});

test("each gathered row has a curve from the end of its persistent row", () => {
  const panel = small.panels[1];
  const { layout } = panel;
  const { root } = render(view, { ...small, panels: [panel] });
  const curves = root.querySelectorAll("path").map((n) => n.getAttribute("d")).filter((d) => d.includes("C"));
  assert.equal(curves.length, panel.gathered.length);
  const centre = (i) => layout.top + (i + 0.5) * layout.row;
  panel.gathered.forEach((row, position) => {
    const source = panel.rows.findIndex((each) => each.row === row.row);
    const from = layout.left + panel.rows[source].blocks.length * layout.chip + 6;
    assert.ok(curves[position].startsWith(`M${from} ${centre(source)}C`), curves[position]);
    assert.ok(curves[position].endsWith(` ${layout.index - 3} ${centre(position)}`), curves[position]);
  });
});

test("a shared block belongs to both of its owners; what happened to a block is a badge", () => {
  const { root } = render(view, small);
  const shared = ofRequest(root, "A").filter((n) => n.getAttribute("data-request") === "A C");
  assert.equal(shared.length, 2);
  assert.match(tip(shared[0]), /^block 1: A and C, ref_cnt 2/);
  assert.deepEqual(shared[0].querySelectorAll("text.rs-badge").map((n) => n.textContent), ["✓"]);
});

test("pointing at a block selects its request, and the selection is marked everywhere", () => {
  const { root, model } = render(view, small);
  ofRequest(root, "D")[0].dispatch("pointerover");
  assert.equal(model.get("selected"), "D");
  assert.equal(model.saved, 1);
  model.change("selected", "C");
  assert.ok(ofRequest(root, "C").every((n) => n.classList.contains("rs-chosen")));
  assert.ok(ofRequest(root, "D").every((n) => !n.classList.contains("rs-chosen")));
});

test("ids are text, whatever they hold", () => {
  const evil = "<img src=x onerror=alert(1)>";
  const swap = JSON.parse(JSON.stringify(small).replaceAll('"D"', JSON.stringify(evil)));
  const { root } = render(view, swap);
  assert.equal(root.querySelectorAll("img").length, 0);
  assert.ok(root.querySelectorAll("title").some((n) => n.textContent.startsWith(`${evil}, row`)));
});

test("blocks that look alike share a path when there are many, and none is lost", () => {
  const { root } = render(view, models.block_tables.many);
  const elements = root.all().length;
  assert.ok(elements < 4500, `${elements} elements`);
  const model = models.block_tables.many.panels[1].pool;
  const pool = root.querySelectorAll("section")[1].querySelectorAll("svg")[1];
  const groups = pool.children.filter((n) => n.tagName === "path");
  const grouped = groups.reduce((sum, n) => sum + n.getAttribute("d").split("M").length - 1, 0);
  const single = pool.children.filter((n) => n.tagName === "g").length;
  assert.equal(grouped + single, model.cells.length);
  assert.ok(groups.some((n) => /^[A-Z]\d?: blocks /.test(tip(n))));
});

test("nothing is drawn before there is a step, and the cleanup leaves nothing behind", () => {
  const { root, model, parent, cleanup } = render(view, {});
  assert.equal(root.querySelectorAll("svg").length, 0);
  model.change("model", small);
  assert.equal(root.querySelectorAll("svg").length, 4);
  cleanup();
  assert.equal(listenersOf(root) + model.handlers.length + parent.children.length, 0);
});
