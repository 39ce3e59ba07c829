import assert from "node:assert/strict";
import { test } from "node:test";
import { listenersOf, loadModule, models, render } from "./dom.mjs";

const sampling = await loadModule("sampling");
const small = models.sampling.small;
const texts = (nodes) => nodes.map((node) => node.textContent);

test("tokens are lines, stages columns, and every number of the model is on the page", () => {
  const { root } = render(sampling, small);
  const [panel] = small.panels;
  const heads = texts(root.querySelector("thead").querySelectorAll("th"));
  assert.deepEqual(heads.slice(2, 4), ["logprob", "rank"], "logprobs are of the model's own distribution");
  assert.equal(heads.length, 1 + panel.stages.length + 2 + panel.races.length);
  const rows = root.querySelector("tbody").querySelectorAll("tr");
  assert.deepEqual(texts(rows.map((row) => row.querySelector("th"))), panel.lines.map(({ p, win }) => p.join("") + (win.length ? ` ◀ ${win.join(" ")}` : "")));
  panel.lines.forEach(({ cells, logprob, races }, i) => {
    const shown = rows[i].textContent;
    for (const { p, x, d } of cells) for (const text of [p, x, d]) assert.ok(shown.includes(text), `${text} in ${shown}`);
    for (const text of logprob) assert.ok(shown.includes(text));
    for (const one of races.filter(Boolean)) assert.ok(shown.includes(`${one.n} ${one.s}`));
  });
  for (const text of [...panel.say, panel.more, ...panel.stages.map(({ left }) => left)]) assert.ok(root.textContent.includes(text));
});

test("a bar is as wide as its probability, a cut shows where it was, and the winner stands out", () => {
  const { root } = render(sampling, small);
  const [panel] = small.panels;
  const rows = root.querySelector("tbody").querySelectorAll("tr");
  panel.lines.forEach(({ cells, win }, i) => {
    const bars = rows[i].querySelectorAll("td.rs-p").map((cell) => cell.getAttribute("style"));
    assert.deepEqual(bars, cells.filter(({ k }) => !k).map(({ w }) => `--w:${(100 * w).toFixed(1)}%`));
    assert.equal(rows[i].querySelectorAll("td.rs-cut").length, cells.filter(({ k }) => k === "cut").length);
    assert.equal(rows[i].classList.contains("rs-win"), win.length > 0);
  });
  panel.races.forEach((_, place) => {
    const tracks = rows.map((row) => row.querySelectorAll("[style]").filter((cell) => cell.getAttribute("style").startsWith("--a"))[place]);
    const ends = tracks.filter(Boolean).map((cell) => [parseFloat(cell.getAttribute("style").split("--b:")[1]), cell.classList.contains("rs-won")]);
    const best = ends.reduce((one, other) => (other[0] > one[0] ? other : one));
    assert.ok(best[1] && ends.filter(([, won]) => won).length === 1, "the winner's sum is the rightmost of its track");
  });
});

test("a greedy draw has logits and no noise", () => {
  const { root } = render(sampling, models.sampling.greedy);
  assert.ok(root.textContent.includes("V1 is greedy"));
  assert.equal(root.querySelectorAll("thead")[0].querySelectorAll("th").length, 1 + 1 + 2 + 1);
});

test("a click chooses a token or a request, and “newest” lets go again", () => {
  const { root, model } = render(sampling, { ...small, pinned: true });
  const [requests, tokens] = root.querySelectorAll("[data-list]");
  tokens.children[0].dispatch("click");
  assert.equal(model.values.position, small.tokens[0].at);
  requests.children[1].dispatch("click");
  assert.deepEqual([model.values.request, model.values.position], ["B", -1]);
  model.values.position = 7;
  root.querySelectorAll("[data-set]").find((node) => node.textContent === "newest").dispatch("click");
  assert.deepEqual([model.values.position, model.saved], [-1, 3]);
});

test("arrows choose in the list that has the focus, and nowhere else", () => {
  const { root, model } = render(sampling, small);
  const [requests, tokens] = root.querySelectorAll("[data-list]");
  let taken = 0;
  const press = (node, key, more) => node.dispatch("keydown", { key, preventDefault: () => (taken += 1), ...more });
  press(tokens, "ArrowLeft");
  assert.equal(model.values.position, small.tokens.at(-2).at);
  press(tokens, "Home");
  assert.equal(model.values.position, small.tokens[0].at);
  press(requests, "End");
  assert.equal(model.values.request, small.requests.at(-1)[0]);
  assert.equal(taken, 3);
  press(tokens, "ArrowRight");
  press(root, "ArrowLeft");
  press(tokens, "ArrowLeft", { ctrlKey: true });
  press(tokens, "x");
  assert.deepEqual([taken, model.saved], [4, 3], "past the end nothing is chosen, and other keys are left alone");
  for (const list of [requests, tokens]) {
    assert.equal(list.getAttribute("role"), "listbox");
    assert.equal(list.querySelectorAll("[aria-selected]").filter((each) => each.getAttribute("aria-selected") === "true").length, 1);
  }
});

test("closed it is one line; its button opens it, and the open one closes it", () => {
  const { root, model } = render(sampling, models.sampling.closed);
  assert.equal(root.querySelectorAll("table").length, 0);
  const toggle = root.querySelector("button");
  assert.deepEqual([toggle.textContent, toggle.getAttribute("aria-expanded")], ["show", "false"]);
  toggle.dispatch("click");
  assert.equal(model.values.watching, true);
  model.change("model", { ...models.sampling.closed, open: true, note: "step on" });
  assert.ok(root.textContent.includes("step on"));
  root.querySelector("button").dispatch("click");
  assert.equal(model.values.watching, false);
});

test("a token that looks like markup is text", () => {
  const { root, model } = render(sampling, small);
  const evil = "<img src=x onerror=alert(1)>";
  const line = { ...small.panels[0].lines[0], p: [evil] };
  model.change("model", { ...small, before: [evil], panels: [{ ...small.panels[0], lines: [line], say: [evil], more: evil }] });
  assert.equal(root.querySelectorAll("img").length, 0);
  assert.ok(root.textContent.includes(evil));
});

test("a new step replaces the old one, and the cleanup leaves nothing behind", () => {
  const { parent, root, model, cleanup } = render(sampling, small);
  model.change("model", models.sampling.many);
  assert.equal(root.querySelectorAll("[data-request]").length, models.sampling.many.requests.length);
  cleanup();
  assert.deepEqual([parent.children.length, model.handlers.length, listenersOf(root)], [0, 0, 0]);
});
