// The life of a view: what the modules of all views share once something is on the page.
import { el, make, patch } from "./dom.js";

/** A view model as it travels (JSON in a buffer) or as it is. */
export function unpack(value) {
  return value instanceof DataView ? JSON.parse(new TextDecoder().decode(value)) : value;
}

/** Marks every element that belongs to `request` (data-request holds one id, or several with spaces between). */
export function mark(root, request) {
  root.classList.toggle("rs-choosing", Boolean(request));
  for (const node of root.querySelectorAll("[data-request]")) {
    const owners = node.getAttribute("data-request").split(" ");
    node.classList.toggle("rs-chosen", Boolean(request) && owners.includes(request));
  }
}

/** While a command of the bar is at work the dashboard says so, and its views hold back what they have drawn. */
const waiting = (node) => node.closest("[data-rs-waiting]");

/** Sent to the dashboard when its command is done and every view has its new model. */
export const DONE = "rs-done";

/**
 * `callback` once before a frame, however often the returned function is called, and not while a command is at work: all views
 * change at once, and the page is laid out once. Without frames, outside a browser, at once.
 */
function eachFrame(node, callback) {
  if (!globalThis.requestAnimationFrame) return Object.assign(() => callback(), { cancel() {} });
  let frame = 0;
  let home = null;
  const call = () => {
    frame = 0;
    if (waiting(node)) soon();
    else callback();
  };
  const soon = () => {
    home = waiting(node);
    if (home) home.addEventListener(DONE, soon, { once: true });
    else frame ||= requestAnimationFrame(call);
  };
  const cancel = () => {
    cancelAnimationFrame(frame);
    home?.removeEventListener(DONE, soon);
  };
  return Object.assign(soon, { cancel });
}

/** Does `work` once the page has nothing more urgent to do, but soon; the work of all views before one and the same frame. */
function whenIdle(work) {
  const soon = () => requestAnimationFrame(work);
  if (globalThis.requestIdleCallback) requestIdleCallback(soon, { timeout: 300 });
  else setTimeout(soon);
}

/** What of a view nobody sees just now: the whole of it, or some of its lazy nodes, with what has still to be done to them. */
class Unseen {
  constructor(root, onSight) {
    this.root = root;
    this.onSight = onSight;
    this.known = new WeakSet();
    this.nodes = new WeakSet();
    this.kept = new Map();
    this.watcher = globalThis.IntersectionObserver ? new IntersectionObserver((entries) => entries.forEach((each) => this.see(each))) : null;
    this.watcher?.observe(root);
  }

  see({ target, isIntersecting }) {
    if (isIntersecting) this.nodes.delete(target);
    else this.nodes.add(target);
    this.settle(target);
    if (isIntersecting && target === this.root) this.onSight();
  }

  holds(node) {
    return this.nodes.has(node);
  }

  /** Of several changes that were put off, what was before the first and what is to be after the last. */
  keep(node, was, now) {
    this.kept.set(node, { was: this.kept.get(node)?.was ?? was, now });
  }

  settle(node) {
    const kept = this.kept.get(node);
    this.kept.delete(node);
    if (kept) patch(node, kept.was, kept.now);
  }

  /** Does all that was put off, and learns of the lazy nodes that are new. */
  rest() {
    for (const node of [...this.kept.keys()]) this.settle(node);
    for (const node of this.root.querySelectorAll(".rs-lazy")) {
      if (!this.known.has(node)) this.watcher?.observe(node);
      this.known.add(node);
    }
  }

  drop() {
    this.watcher?.disconnect();
  }
}

/**
 * The life of a view: `draw(model)` returns descriptions for a view model; it is called now and at each change. A request that
 * is hovered or focused here is set as `selected`, and the selected one is marked. Returns the cleanup, which drops every
 * listener. A described node carries no listeners; a view that puts in nodes of its own says so with `own`, and is drawn only
 * when it is shown, since drawing changes them.
 *
 * What a reader sees is drawn before the next frame. What is out of sight follows once the page is idle; until then the view
 * says aria-busy. A view that the browser skips (see content-visibility in common.css) is drawn once it comes nearer.
 */
export function mount({ model, el: parent }, name, draw, { own = false } = {}) {
  const root = make(el("div", { class: `rs-view rs-${name}` }));
  parent.appendChild(root);
  let [shown, next] = [[], null];
  let [skipped, stale, late] = [false, false, false];
  const unseen = new Unseen(root, () => late && show());
  const showSelection = () => mark(root, model.get("selected"));
  const describe = () => [draw(unpack(model.get("model")))].flat(Infinity).filter(Boolean);
  const show = () => {
    [stale, late] = [skipped, false];
    if (skipped) return root.removeAttribute("aria-busy");
    const focused = root.contains(document.activeElement) ? document.activeElement : null;
    next ??= describe();
    patch(root, shown, next, unseen);
    [shown, next] = [next, null];
    if (model.get("selected")) showSelection();
    // A node that was taken out has lost the focus; without it the keys would go elsewhere.
    const heir = root.contains(focused) ? focused : root.closest(".rs-dashboard");
    if (focused && document.activeElement !== focused) heir?.focus({ preventScroll: true });
    if (unseen.watcher) afterwards();
  };
  const afterwards = () => {
    if (late || unseen.kept.size) root.setAttribute("aria-busy", "true");
    whenIdle(() => {
      if (!root.isConnected) return;
      if (late) return show();
      unseen.rest();
      root.removeAttribute("aria-busy");
    });
  };
  const choose = (request) => {
    if (request === model.get("selected")) return;
    model.set("selected", request);
    model.save_changes();
  };
  const enter = (event) => {
    const owner = event.target.closest("[data-request]");
    choose(owner ? owner.getAttribute("data-request").split(" ")[0] : "");
  };
  const leave = () => choose("");
  const sight = (event) => {
    if (event.target !== root) return;
    skipped = event.skipped;
    if (stale) show();
  };
  const listeners = [
    ["pointerover", enter], ["focusin", enter], ["pointerleave", leave], ["focusout", leave],
    ["contentvisibilityautostatechange", sight],
  ];
  for (const [event, listener] of listeners) root.addEventListener(event, listener);
  const showSoon = eachFrame(root, () => {
    late = unseen.holds(root) && !skipped;
    if (late) afterwards();
    else show();
  });
  const changed = () => {
    next = !own && !unseen.holds(root) && waiting(root) ? describe() : null; // while the kernel works on the other views
    showSoon();
  };
  model.on("change:model", changed);
  model.on("change:selected", showSelection);
  show();
  return () => {
    showSoon.cancel();
    unseen.drop();
    model.off("change:model", changed);
    model.off("change:selected", showSelection);
    for (const [event, listener] of listeners) root.removeEventListener(event, listener);
    root.remove();
  };
}
