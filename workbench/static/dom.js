// Describing elements, and putting them on the page. Text goes in as text nodes and attributes only, so that a token can never
// become markup.

const SVG = "http://www.w3.org/2000/svg";

/**
 * A description of an HTML element: plain values, cheap to make anew at every step. `make` makes a node of it, `patch` changes
 * only what differs on the page. Children are descriptions, texts, nodes of one's own, nested lists of them, or nothing.
 */
export function el(tag, attributes, ...children) {
  return { tag, space: null, attributes: attributes ?? {}, children: flat(children) };
}

/** As `el`, of an SVG element. */
export function svg(tag, attributes, ...children) {
  return { tag, space: SVG, attributes: attributes ?? {}, children: flat(children) };
}

function flat(children, into = []) {
  for (const child of children) {
    if (Array.isArray(child)) flat(child, into);
    else if (typeof child === "object") child && into.push(child);
    else if (child !== undefined && child !== false) into.push(String(child));
  }
  return into;
}

/** The tooltip of an SVG element: give it as a child. */
export function title(text) {
  return svg("title", {}, text);
}

/** The heading of a view, and a quieter note beside it. */
export function heading(text, note) {
  return el("h3", { class: "rs-heading" }, text, note ? el("small", {}, ` ${note}`) : null);
}

/** Text whose odd pieces are signs that stand for what would not show: ␣, \n, … */
export function pieces(parts) {
  return parts.map((text, i) => (text === "" ? null : i % 2 ? el("span", { class: "rs-sign" }, text) : text));
}

/** The pieces of a text, cut to `room` characters. A page that clipped each cell instead would paint each by itself. */
export function cut(parts, room) {
  let left = room;
  if (parts.reduce((sum, text) => sum + text.length, 0) <= room) return parts;
  return parts.map((text) => {
    const kept = text.length < left ? text : left > 0 ? `${[...text].slice(0, left - 1).join("")}…` : "";
    left -= text.length;
    return kept;
  });
}

/** The node of a description. */
export function make(one) {
  if (typeof one === "string") return document.createTextNode(one);
  if (one.tag === undefined) return one;
  const node = one.space ? document.createElementNS(one.space, one.tag) : document.createElement(one.tag);
  for (const name in one.attributes) write(node, name, one.attributes[name]);
  for (const child of one.children) node.appendChild(make(child));
  return node;
}

const absent = (value) => value === null || value === undefined || value === false;

function write(node, name, value) {
  if (absent(value)) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : String(value));
}

/** As `one`, but while nobody sees it, its children change only once the page has nothing more urgent to do. */
export function lazy(one) {
  const name = one.attributes.class;
  return { ...one, lazy: true, attributes: { ...one.attributes, class: name ? `rs-lazy ${name}` : "rs-lazy" } };
}

/**
 * Makes the children of `parent`, which were described by `was`, those that `now` describes. From step to step little changes:
 * a node is touched only where its description differs, so the browser styles, lays out and paints little; and scroll
 * positions, focus and what a reader has unfolded stay. Children of a lazy node that `unseen` knows are left to it.
 */
export function patch(parent, was, now, unseen = null) {
  let node = parent.firstChild;
  for (let i = 0; i < Math.max(was.length, now.length); i++) {
    const next = node?.nextSibling ?? null;
    if (i >= was.length) parent.appendChild(make(now[i]));
    else if (i >= now.length) node.remove();
    else if (was[i] !== now[i]) become(parent, node, was[i], now[i], unseen);
    node = next;
  }
}

function become(parent, node, was, now, unseen) {
  if (typeof was === "string" && typeof now === "string") {
    node.data = now;
  } else if (was.tag === undefined || was.tag !== now.tag || was.space !== now.space || was.lazy !== now.lazy) {
    parent.replaceChild(make(now), node);
  } else {
    for (const name in now.attributes) {
      const value = now.attributes[name];
      if (was.attributes[name] !== value) write(node, name, value);
    }
    for (const name in was.attributes) if (!(name in now.attributes)) node.removeAttribute(name);
    if (now.lazy && unseen?.holds(node)) unseen.keep(node, was.children, now.children);
    else patch(node, was.children, now.children, unseen);
  }
}
