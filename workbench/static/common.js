// What the modules of all views share: making elements, and the life of a view. Text goes in as text nodes and attributes
// only, so that a token can never become markup.

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.appendChild(typeof child === "object" ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** An HTML element. Children are nodes or texts, nested lists of them, or nothing. */
export function el(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** The tooltip of an SVG element: give it as a child. */
export function title(text) {
  return svg("title", {}, text);
}

/** The heading of a view, and a quieter note beside it. */
export function heading(text, note) {
  return el("h3", { class: "rs-heading" }, text, note ? el("small", {}, ` ${note}`) : null);
}

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

/**
 * Makes the children of `parent` look like `fresh`, keeping every node that can stay: from step to step little changes, so the
 * browser styles, lays out and paints little; and scroll positions, focus and what a reader has unfolded stay.
 */
export function patch(parent, fresh) {
  const old = [...parent.childNodes];
  fresh.forEach((node, i) => (i < old.length ? become(old[i], node) : parent.appendChild(node)));
  for (const node of old.slice(fresh.length)) node.remove();
}

function become(was, now) {
  if (was === now || was.isEqualNode(now)) return;
  if (was.nodeName !== now.nodeName) {
    was.replaceWith(now);
  } else if (was.nodeName === "#text") {
    was.data = now.data;
  } else {
    for (const name of was.getAttributeNames()) if (name !== "open" && !now.hasAttribute(name)) was.removeAttribute(name);
    for (const name of now.getAttributeNames()) {
      if (was.getAttribute(name) !== now.getAttribute(name)) was.setAttribute(name, now.getAttribute(name));
    }
    patch(was, [...now.childNodes]);
  }
}

/** While a command of the bar is at work the dashboard says so, and its views hold back what they have drawn. */
const waiting = (node) => node.closest("[data-rs-waiting]") !== null;

/**
 * `callback` once before a frame, however often the returned function is called, and not while a command is at work: all views
 * change at once, and the page is laid out once. Without frames, outside a browser, at once.
 */
function eachFrame(node, callback) {
  if (!globalThis.requestAnimationFrame) return Object.assign(() => callback(), { cancel() {} });
  let frame = 0;
  const call = () => {
    frame = waiting(node) ? requestAnimationFrame(call) : 0;
    if (!frame) callback();
  };
  return Object.assign(() => void (frame ||= requestAnimationFrame(call)), { cancel: () => cancelAnimationFrame(frame) });
}

/**
 * The life of a view: `draw(model)` returns the nodes for a view model; it is called now and at each change. A request that is
 * hovered or focused here is set as `selected`, and the selected one is marked. Returns the cleanup, which drops every listener.
 * The nodes of a new model are patched into the old ones and must carry no listeners; with `own`, `draw` keeps nodes of its own
 * from one model to the next, and they are put in as they are.
 */
export function mount({ model, el: parent }, name, draw, { own = false } = {}) {
  const root = el("div", { class: `rs-view rs-${name}` });
  parent.appendChild(root);
  const showSelection = () => mark(root, model.get("selected"));
  // Out of sight (see content-visibility in common.css) nothing is drawn; the newest model is, once it comes into sight.
  let skipped = false;
  let stale = false;
  let made = null;
  const make = () => [draw(unpack(model.get("model")))].flat(Infinity).filter(Boolean);
  const show = () => {
    stale = skipped;
    if (skipped) return;
    const focused = root.contains(document.activeElement) ? document.activeElement : null;
    if (own) root.replaceChildren(...make());
    else patch(root, made ?? make());
    made = null;
    if (model.get("selected")) showSelection();
    // A node that was taken out has lost the focus; without it the keys would go elsewhere.
    const heir = root.contains(focused) ? focused : root.closest(".rs-dashboard");
    if (focused && document.activeElement !== focused) heir?.focus({ preventScroll: true });
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
  const showSoon = eachFrame(root, show);
  const changed = () => {
    made = !own && !skipped && waiting(root) ? make() : null; // while the kernel works on the other views
    showSoon();
  };
  model.on("change:model", changed);
  model.on("change:selected", showSelection);
  show();
  return () => {
    showSoon.cancel();
    model.off("change:model", changed);
    model.off("change:selected", showSelection);
    for (const [event, listener] of listeners) root.removeEventListener(event, listener);
    root.remove();
  };
}
