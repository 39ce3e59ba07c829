// The bar: buttons and keys send commands to the kernel, one at a time; the form holds its edits until they are applied.
import { DONE, unpack } from "./common.js";
import { el, make } from "./dom.js";

const node = (...described) => make(el(...described));

export const BUTTONS = [
  { command: "home", face: "⇤", text: "start", key: "Home", hint: "back to before the first step" },
  { command: "back", face: "◀", text: "back", key: "←", hint: "the cursor one step back (the engines never rewind)" },
  { command: "step", face: "▶", text: "step", key: "→", hint: "one step of each runner", primary: true },
  { command: "phase", face: "", text: "phase", key: "P", hint: "one phase of the step" },
  { command: "run", face: "", text: "run 10", key: "R", hint: "ten steps without a pause: the timeline shows true overlap" },
  { command: "until", face: "", text: "until", key: "U", hint: "on until the chosen thing happens" },
];

const KEYS = { Home: "home", ArrowLeft: "back", ArrowRight: "step", p: "phase", r: "run", u: "until", s: "settings", f: "full" };

/** The command of a key press, or null: keys belong to a field while it is being edited, and to the browser with Ctrl, Alt or Meta. */
export function commandOf(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return null;
  if (event.target?.closest?.("input, textarea, select, [contenteditable]")) return null;
  return KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key] ?? null;
}

export const FIELDS = [
  { name: "runners", text: "runners", options: [["both", "both"], ["v1", "V1 only"], ["v2", "V2 only"]] },
  { name: "loop", text: "loop", options: [["overlapped", "overlapped"], ["plain", "plain"]] },
  { name: "chat", text: "prompts are", options: [["text", "plain text"], ["chat", "chat"]], hint: "a chat message goes through the model's chat template" },
  { name: "temperature", text: "temperature", hint: "0 is greedy", step: "0.1", min: "0" },
  { name: "top_p", text: "top_p", step: "0.05", min: "0", max: "1" },
  { name: "seed", text: "seed", step: "1", hint: "empty: none, the request draws from the engine's seed" },
  { name: "max_tokens", text: "max_tokens", step: "1", min: "1" },
  { name: "block_size", text: "block_size", step: "1", min: "1", hint: "tokens in a KV block" },
  { name: "num_gpu_blocks_override", text: "blocks", step: "1", min: "2", hint: "num_gpu_blocks_override: KV blocks in the pool, block 0 among them" },
  { name: "max_num_batched_tokens", text: "budget", step: "1", min: "1", hint: "max_num_batched_tokens: tokens a step may compute" },
  { name: "max_num_seqs", text: "rows", step: "1", min: "1", hint: "max_num_seqs: requests that may run at once" },
];

const PROMPT_HINT = "One prompt a line; \\n stands for a line end. In front: @4 comes in step 4, #8 has max_tokens 8. "
  + "Anything more as JSON: {\"prompt\": \"…\", \"priority\": 1, \"sampling_params\": {\"temperature\": 0.8}}";

function field({ name, text, hint, options, ...limits }) {
  const input = options
    ? node("select", { name }, options.map(([value, face]) => node("option", { value }, face)))
    : node("input", { name, type: "number", inputmode: "decimal", ...limits });
  return node("label", { class: "rs-field", title: hint }, node("span", {}, text), input);
}

function button({ command, face, text, key, hint, primary }) {
  const label = command === "until" ? `${text} …` : text;
  return node(
    "button", { type: "button", class: primary ? "rs-primary" : null, "data-command": command, title: `${hint} (${key})`, "aria-keyshortcuts": key },
    face ? `${face} ` : null, label, " ", node("kbd", {}, key),
  );
}

function build() {
  const parts = {
    chip: node("span", { class: "rs-chip" }),
    conditions: node("select", { class: "rs-conditions", "aria-label": "run until", title: "what “until” waits for" }),
    place: node("span", { class: "rs-place" }),
    waits: node("span", { class: "rs-waits" }),
    error: node("div", { class: "rs-error", role: "alert" }),
    note: node("span", { class: "rs-quiet rs-note" }),
    prompts: node("textarea", { name: "prompts", rows: "4", spellcheck: "false", "aria-label": "prompts, one a line" }),
    apply: node("button", { type: "submit", class: "rs-apply", title: "begin anew with this form (Ctrl+Enter)" }, "apply ", node("kbd", {}, "Ctrl ⏎")),
    live: node("span", { class: "rs-hidden", role: "status", "aria-live": "polite" }),
  };
  const buttons = BUTTONS.map(button);
  parts.form = node(
    "form", { class: "rs-form", novalidate: true },
    node("label", { class: "rs-prompts", title: PROMPT_HINT }, node("span", {}, "prompts ", node("small", {}, "one a line; @4 in front comes in step 4, #8 has 8 tokens")), parts.prompts),
    node("div", { class: "rs-fields" }, FIELDS.map(field), node("div", { class: "rs-send" }, parts.apply)),
  );
  parts.bar = node(
    "div", { class: "rs-bar", role: "toolbar", "aria-label": "steps" },
    node("span", { class: "rs-buttons" }, buttons, parts.conditions),
    node("span", { class: "rs-buttons rs-end" },
      node("button", { type: "button", "data-command": "settings", title: "show or hide the form (S)", "aria-keyshortcuts": "S" }, "settings ", node("kbd", {}, "S")),
      node("button", { type: "button", "data-command": "full", title: "the whole screen (F)", "aria-keyshortcuts": "F" }, "⤢ ", node("kbd", {}, "F"))),
  );
  parts.head = node(
    "div", { class: "rs-head" }, node("strong", { class: "rs-brand" }, "runnerscope"), parts.chip, parts.place, parts.note, parts.waits,
  );
  return parts;
}

/** The form's values as they stand. */
export function readForm(form) {
  return Object.fromEntries([...form.querySelectorAll("[name]")].map((input) => [input.getAttribute("name"), input.value]));
}

function writeForm(form, values) {
  for (const input of form.querySelectorAll("[name]")) {
    const value = values[input.getAttribute("name")];
    input.value = value === null || value === undefined ? "" : String(value);
  }
}

function showPlace(parts, state) {
  const total = state.steps ?? 0;
  parts.place.replaceChildren(
    "step ", node("b", {}, state.step), ` / ${Math.max(total, state.step)}`, node("span", { class: "rs-quiet" }, ` · ${state.phase}`),
  );
  parts.waits.replaceChildren(...(state.waits ?? []).map((wait) =>
    node("span", { class: wait.count ? "rs-chip rs-waiting" : "rs-chip", title: wait.title }, `${wait.runner} `, node("b", {}, wait.text.split(" ")[0]), ` ${wait.text.split(" ").slice(1).join(" ")}`)));
  parts.chip.replaceChildren([...(state.chip ?? []), state.loop ? `${state.loop} loop` : ""].filter(Boolean).join(" · "));
  parts.note.replaceChildren(state.finished && state.step === total ? "· everything is done" : "");
  parts.error.replaceChildren(state.error ?? "");
  parts.live.replaceChildren(`step ${state.step}, ${state.phase}`);
}

function showConditions(select, state) {
  if (select.children.length === 0) {
    select.replaceChildren(...(state.conditions ?? []).map(([name, text]) => node("option", { value: name, title: text }, text)));
    select.value = "finished";
  }
}

function render({ model, el: parent }) {
  const parts = build();
  const root = node("div", { class: "rs-view rs-controls" }, parts.head, parts.bar, parts.error, parts.form, parts.live);
  parent.appendChild(root);
  let sent = 0;
  let acknowledged = 0;
  let shown = "";
  let home = null;
  let showing = 0;

  const showBusy = () => {
    root.classList.toggle("rs-busy", busy());
    home?.toggleAttribute("data-rs-waiting", busy());
    if (!busy()) home?.dispatchEvent(new Event(DONE));
  };
  const busy = () => sent > acknowledged;
  const send = (command, more) => {
    if (busy()) return;
    sent = acknowledged + 1;
    showBusy();
    model.send({ command, seq: sent, ...more });
  };
  const act = (command) => {
    if (command === "settings") parts.form.toggleAttribute("hidden");
    else if (command === "full") toggleFull(home ?? root);
    else if (command === "until") send("until", { condition: parts.conditions.value });
    else if (command === "run") send("run", { n: 10 });
    else send(command);
  };
  const apply = (event) => {
    event?.preventDefault();
    send("apply", { form: readForm(parts.form) });
  };
  const show = (state) => {
    showConditions(parts.conditions, state);
    showPlace(parts, state);
    const form = JSON.stringify(state.form ?? {});
    if (form !== shown) writeForm(parts.form, state.form ?? {});
    shown = form;
    edited();
  };
  // The views hold back until here, and are all drawn before the next frame; only then does the bar say where they stand.
  const refresh = () => {
    const state = unpack(model.get("model"));
    acknowledged = state.ack ?? 0;
    showBusy();
    cancelAnimationFrame(showing);
    showing = requestAnimationFrame(() => show(state));
  };
  const edited = () => {
    const now = readForm(parts.form);
    const base = JSON.parse(shown || "{}");
    parts.apply.classList.toggle("rs-primary", Object.keys(now).some((name) => now[name] !== String(base[name] ?? "")));
  };
  const click = (event) => {
    const command = event.target.closest("[data-command]")?.getAttribute("data-command");
    if (command) act(command);
  };
  const key = (event) => {
    if (!home || !home.contains(event.target)) return;
    const inForm = parts.form.contains(event.target);
    if (inForm && event.key === "Enter" && (event.ctrlKey || event.metaKey)) return apply(event);
    if (event.key === "Escape" && event.target.closest?.("input, textarea, select")) return home.focus({ preventScroll: true });
    const command = commandOf(event);
    if (!command) return;
    event.preventDefault();
    event.stopPropagation();
    if (!event.repeat || !busy()) act(command);
  };
  // The dashboard is around this view only once the page has put it there.
  const adopt = () => {
    home = root.closest(".rs-dashboard") ?? (root.isConnected ? root : null);
    if (!home) return void (frame = requestAnimationFrame(adopt));
    home.setAttribute("tabindex", "0");
    home.setAttribute("data-lm-suppress-shortcuts", "true");
    home.setAttribute("aria-label", "runnerscope dashboard");
  };
  let frame = requestAnimationFrame(adopt);

  root.addEventListener("click", click);
  parts.form.addEventListener("submit", apply);
  parts.form.addEventListener("input", edited);
  document.addEventListener("keydown", key);
  model.on("change:model", refresh);
  acknowledged = unpack(model.get("model")).ack ?? 0;
  show(unpack(model.get("model")));
  return () => {
    cancelAnimationFrame(frame);
    cancelAnimationFrame(showing);
    root.removeEventListener("click", click);
    parts.form.removeEventListener("submit", apply);
    parts.form.removeEventListener("input", edited);
    document.removeEventListener("keydown", key);
    model.off("change:model", refresh);
    root.remove();
  };
}

function toggleFull(node) {
  if (document.fullscreenElement) document.exitFullscreen();
  else node.requestFullscreen?.();
}

export default { render };
