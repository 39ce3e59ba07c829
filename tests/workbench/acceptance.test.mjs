import assert from "node:assert/strict";
import { test } from "node:test";
import { listenersOf, loadModule, models, render } from "./dom.mjs";

const acceptance = await loadModule("acceptance");
const small = models.acceptance.small;
const texts = (nodes) => nodes.map((node) => node.textContent);

test("every token of a block stands with its numbers under its outcome", () => {
  const { root } = render(acceptance, small);
  const sections = root.querySelectorAll("section");
  assert.equal(sections.length, small.panels.length);
  small.panels.forEach(({ blocks, say, rule, more }, i) => {
    const rows = sections[i].querySelector("tbody").querySelectorAll("tr");
    assert.equal(rows.length, blocks.length);
    blocks.forEach(({ at, n, cells }, j) => {
      const [place, count, ...shown] = rows[j].querySelectorAll("td");
      assert.deepEqual(texts([place, count]), [String(at), n]);
      assert.equal(shown.length, cells.length);
      cells.forEach(({ k, p, v, t }, c) => {
        assert.ok(shown[c].classList.contains(`rs-${k}`));
        assert.equal(shown[c].getAttribute("title"), t);
        assert.ok(shown[c].textContent.startsWith(p.join("")));
        for (const [name, value] of v) assert.ok(shown[c].textContent.includes(`${name} ${value}`));
      });
    });
    for (const text of [say, rule, more]) assert.ok(sections[i].textContent.includes(text));
  });
});

test("shares are bars, counts are said, and what was never reached has no share", () => {
  const { root, model } = render(acceptance, small);
  const [panel] = small.panels;
  const rows = root.querySelectorAll("section")[0].querySelectorAll("tbody")[1].querySelectorAll("tr");
  panel.positions.forEach(({ c, a, of }, i) => {
    const bars = rows[i].querySelectorAll(".rs-share");
    assert.deepEqual(bars.map((bar) => bar.getAttribute("style")), [c, a].map((x) => `--w:${(100 * x).toFixed(1)}%`));
    assert.ok(rows[i].textContent.endsWith(of.join(" / ")));
  });
  model.change("model", { ...small, panels: [{ ...panel, positions: [{ k: 1, c: null, a: 0, of: [0, 0, 3] }] }] });
  assert.equal(root.querySelectorAll("tbody")[1].querySelectorAll(".rs-share").length, 1);
});

test("the histogram has every count, and the diagram a point for each bin", () => {
  const { root } = render(acceptance, small);
  small.panels.forEach(({ history, reliability }, i) => {
    const section = root.querySelectorAll("section")[i];
    const rows = section.querySelectorAll("tbody")[2].querySelectorAll("tr");
    history.rows.forEach(([length, counts], j) => {
      assert.deepEqual(texts(rows[j].querySelectorAll("td")), [length, ...counts.map((count) => count || "")].map(String));
    });
    const { stages, head, rows: measures, say, note } = reliability;
    const svgs = section.querySelectorAll("svg");
    assert.equal(svgs.length, 2, "before calibration and after");
    stages.forEach(({ name, points, bars, ece }, j) => {
      assert.equal(svgs[j].querySelectorAll("circle").length, points.length);
      const heights = svgs[j].querySelectorAll(".rs-count").map((bar) => Number(bar.getAttribute("height")));
      const counts = bars.filter(Boolean);
      assert.deepEqual(heights, counts.map((count) => Number(((36 * count) / Math.max(...bars)).toFixed(1))));
      assert.ok(section.textContent.includes(`${name}: ECE ${ece.toFixed(3)}`));
    });
    const lines = section.querySelector(".rs-reliability").querySelectorAll("tr");
    assert.deepEqual(lines.map((line) => texts(line.children)), [head, ...measures]);
    for (const text of [say, note]) assert.ok(section.textContent.includes(text));
  });
  const without = render(acceptance, models.acceptance.many).root;
  assert.equal(without.querySelectorAll("circle").length, 0);
});

test("synthetic acceptance is marked", () => {
  const { root, model } = render(acceptance, models.acceptance.synthetic);
  assert.ok(root.querySelector(".rs-synthetic").textContent.includes("say nothing about the drafter"));
  model.change("model", small);
  assert.equal(root.querySelectorAll(".rs-synthetic").length, 0);
});

test("a click chooses a request", () => {
  const { root, model } = render(acceptance, small);
  root.querySelectorAll("[data-request]").find((node) => node.textContent === "B").dispatch("click");
  assert.deepEqual([model.values.request, model.saved], ["B", 1]);
});

test("closed it is one line; its button opens it, and the open one closes it", () => {
  const { root, model } = render(acceptance, models.acceptance.closed);
  assert.equal(root.querySelectorAll("table").length, 0);
  const toggle = root.querySelector("button");
  assert.deepEqual([toggle.textContent, toggle.getAttribute("aria-expanded")], ["show", "false"]);
  toggle.dispatch("click");
  assert.equal(model.values.watching, true);
  model.change("model", { ...models.acceptance.closed, open: true, note: "step on" });
  assert.ok(root.textContent.includes("step on"));
  root.querySelector("button").dispatch("click");
  assert.equal(model.values.watching, false);
});

test("a token that looks like markup is text", () => {
  const { root, model } = render(acceptance, small);
  const evil = "<img src=x onerror=alert(1)>";
  const cell = { ...small.panels[0].blocks[0].cells[0], p: [evil], t: evil };
  model.change("model", { ...small, panels: [{ ...small.panels[0], say: evil, blocks: [{ at: 1, step: 1, n: "0 of 1", cells: [cell] }] }] });
  assert.equal(root.querySelectorAll("img").length, 0);
  assert.ok(root.textContent.includes(evil));
});

test("a new step replaces the old one, and the cleanup leaves nothing behind", () => {
  const { parent, root, model, cleanup } = render(acceptance, small);
  model.change("model", models.acceptance.many);
  assert.equal(root.querySelectorAll("[data-request]").length, models.acceptance.many.requests.length);
  cleanup();
  assert.deepEqual([parent.children.length, model.handlers.length, listenersOf(root)], [0, 0, 0]);
});
