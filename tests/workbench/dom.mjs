// A small stand-in for the browser's document, enough for the modules of workbench/static, and what their tests share.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

class Node {
  constructor() {
    this.childNodes = [];
    this.parentNode = null;
  }
  get textContent() {
    return this.childNodes.map((child) => child.textContent).join("");
  }
  isEqualNode(other) {
    return (
      this.nodeName === other.nodeName && this.data === other.data && this.childNodes.length === other.childNodes.length
      && JSON.stringify([...(this.attributes ?? [])].sort()) === JSON.stringify([...(other.attributes ?? [])].sort())
      && this.childNodes.every((child, i) => child.isEqualNode(other.childNodes[i]))
    );
  }
  get firstChild() {
    return this.childNodes[0] ?? null;
  }
  get nextSibling() {
    const siblings = this.parentNode.childNodes;
    return siblings[siblings.indexOf(this) + 1] ?? null;
  }
  replaceChild(fresh, old) {
    fresh.remove();
    fresh.parentNode = this;
    this.childNodes[this.childNodes.indexOf(old)] = fresh;
    old.parentNode = null;
  }
  remove() {
    if (this.parentNode) this.parentNode.childNodes = this.parentNode.childNodes.filter((child) => child !== this);
    this.parentNode = null;
  }
  contains(other) {
    for (let node = other; node; node = node.parentNode) if (node === this) return true;
    return false;
  }
}

class Text extends Node {
  constructor(data) {
    super();
    this.data = String(data);
    this.nodeName = "#text";
  }
  get textContent() {
    return this.data;
  }
}

export class Element extends Node {
  constructor(tag) {
    super();
    this.tagName = this.nodeName = tag;
    this.attributes = new Map();
    this.listeners = [];
    this.classList = {
      contains: (name) => this.#classes().includes(name),
      toggle: (name, on = !this.#classes().includes(name)) => {
        const rest = this.#classes().filter((each) => each !== name);
        this.setAttribute("class", [...rest, ...(on ? [name] : [])].join(" "));
      },
    };
  }
  #classes() {
    return (this.getAttribute("class") ?? "").split(" ").filter(Boolean);
  }
  setAttribute(name, value) {
    this.attributes.set(name, String(value));
  }
  getAttribute(name) {
    return this.attributes.get(name) ?? null;
  }
  getAttributeNames() {
    return [...this.attributes.keys()];
  }
  hasAttribute(name) {
    return this.attributes.has(name);
  }
  removeAttribute(name) {
    this.attributes.delete(name);
  }
  get children() {
    return this.childNodes.filter((child) => child instanceof Element);
  }
  appendChild(child) {
    child.parentNode = this;
    this.childNodes.push(child);
    return child;
  }
  append(...children) {
    for (const child of children) this.appendChild(child instanceof Node ? child : new Text(child));
  }
  replaceChildren(...children) {
    for (const child of this.childNodes) child.parentNode = null;
    this.childNodes = [];
    this.append(...children);
  }
  /** Every element below, in document order. */
  all() {
    return this.children.flatMap((child) => [child, ...child.all()]);
  }
  /** Understands one simple selector: tag, .class, [attribute], or tag.class. */
  querySelectorAll(selector) {
    return this.all().filter((node) => node.matches(selector));
  }
  querySelector(selector) {
    return this.querySelectorAll(selector)[0] ?? null;
  }
  matches(selector) {
    const attribute = /^\[([\w-]+)\]$/.exec(selector);
    if (attribute) return this.attributes.has(attribute[1]);
    const [tag, ...classes] = selector.split(".");
    return (tag === "" || tag === this.tagName) && classes.every((name) => this.classList.contains(name));
  }
  closest(selector) {
    for (let node = this; node; node = node.parentNode) if (node.matches?.(selector)) return node;
    return null;
  }
  addEventListener(type, listener, options) {
    this.listeners.push([type, listener]);
    options?.signal?.addEventListener("abort", () => this.removeEventListener(type, listener));
  }
  removeEventListener(type, listener) {
    this.listeners = this.listeners.filter(([t, l]) => t !== type || l !== listener);
  }
  /** Calls the listeners here and above, as a bubbling event of a browser would. */
  dispatch(type, event = {}) {
    for (let node = this; node; node = node.parentNode) {
      for (const [t, listener] of [...(node.listeners ?? [])]) if (t === type) listener({ type, target: this, ...event });
    }
  }
  dispatchEvent(event) {
    this.dispatch(event.type);
  }
  focus() {
    document.activeElement = this;
  }
}

globalThis.document = {
  activeElement: null,
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  createTextNode: (data) => new Text(data),
};

/** anywidget's model: traits, `on`/`off`, and `change` to set one as Python would. */
export function fakeModel(traits) {
  const handlers = [];
  const values = { selected: "", ...traits };
  return {
    values, handlers, saved: 0,
    get: (name) => values[name],
    set: (name, value) => (values[name] = value),
    save_changes() {
      this.saved += 1;
    },
    on: (event, handler) => handlers.push([event, handler]),
    off: (event, handler) => handlers.splice(handlers.findIndex(([e, h]) => e === event && h === handler) >>> 0, 1),
    change(name, value) {
      values[name] = value;
      for (const [event, handler] of [...handlers]) if (event === `change:${name}`) handler();
    },
  };
}

const place = process.env.RUNNERSCOPE_JS;

/** A module as the widgets load it (test_javascript.py writes them), and the view models that Python made for it. */
export const loadModule = (name) => import(pathToFileURL(`${place}/${name}.mjs`).href);
export const models = JSON.parse(readFileSync(`${place}/models.json`, "utf8"));

/** Renders a module on a view model: {parent, model, cleanup, root}. */
export function render(module, viewModel) {
  const parent = new Element("div");
  const model = fakeModel({ model: viewModel });
  const cleanup = module.default.render({ model, el: parent });
  return { parent, model, cleanup, root: parent.children[0] };
}

/** The listeners on an element and all below it. */
export const listenersOf = (node) => [node, ...node.all()].reduce((sum, each) => sum + each.listeners.length, 0);
