// The tokens view: each request's text, token by token, and the sentences on why the step looks so.
import { mount } from "./common.js";
import { el, heading, lazy, pieces } from "./dom.js";

const OF = new Set(["prompt", "cached", "sampled", "flight"]);

const classes = (marks) => marks.map((mark) => (OF.has(mark) ? `rs-of-${mark}` : `rs-${mark}`)).join(" ");

function token({ k, f, p, t }) {
  if (k === "fold") return el("details", {}, el("summary", { title: t }, p[0]), el("span", { class: `rs-token ${classes(f)}` }, t));
  return el("span", { class: `rs-token ${classes([k, ...f])}`, title: t }, pieces(p));
}

function note({ k, text, done }) {
  const bar = done === undefined ? null : el("span", { class: "rs-bar" }, el("i", { style: `width:${Math.round(done * 100)}%` }));
  return el("span", { class: `rs-note rs-note-${k}` }, bar, text);
}

function line(request, { runners, tokens, notes, dim }) {
  const attributes = {
    class: dim ? "rs-line rs-dim" : "rs-line", style: `border-color:${request.color}`, "data-request": request.id,
    tabindex: 0, role: "listitem", "aria-label": `request ${request.id}${runners ? ` on ${runners}` : ""}`,
  };
  const runner = runners ? el("span", { class: "rs-runner" }, runners) : null;
  return lazy(el("div", attributes, el("b", {}, request.id), runner, tokens.map(token), notes.map(note)));
}

const legend = (entries) =>
  el("div", { class: "rs-legend" }, entries.map(([mark, label]) => el("span", { class: `rs-token ${classes([mark])}` }, label)));

const sentence = (parts) =>
  el("p", {}, parts.map(([text, request]) => (request ? el("b", { "data-request": request }, text) : text)));

export function draw({ requests = [], legend: entries = [], why = [], note: agreement = "" }) {
  return [
    heading("tokens", agreement),
    el("div", { class: "rs-lines", role: "list" }, requests.map((request) => request.lines.map((one) => line(request, one)))),
    legend(entries),
    el("div", { class: "rs-why" }, heading("why this step looks so"), why.map(sentence)),
  ];
}

export default { render: (context) => mount(context, "tokens", draw) };
