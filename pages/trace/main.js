// Entry point: unpacks the results, handles choices, and shades the tokens.

import { numbers, unpackText } from "../shared/codec.js";
import { $, el, showError } from "../shared/dom.js";
import { hideTip, showTip } from "../shared/tip.js";
import { counted, percent, weight, whole } from "../shared/words.js";

const ALL = "all", RETRIEVAL = "retrieval", NO_TOKEN = -1, NAMED = 8, BESIDE = 3, NO_TEXT = "·";
const state = { token: NO_TOKEN, heads: ALL };
/** @type {Trace} */
let data;
let shaded = [];  // positions of the prompt's tokens that are colored now
let current = new Map();  // key → weight
/** @type {HTMLElement[]} */
let spans;  // the prompt's tokens

/** Unpacks a table of the strongest keys into a function: `row(n)` returns the `[key, weight]` pairs of row n. */
async function strongest(table) {
  if (!table) return null;
  const [keys, weights] = await Promise.all([numbers(table.keys), numbers(table.weights)]);
  const size = keys.shape.at(-1);
  return (row) => Array.from({ length: size }, (_, n) => [keys.values[row * size + n], weights.values[row * size + n]]).filter(([key]) => key >= 0);
}

/** The chosen token; NO_TOKEN for a choice of heads if the page has no weights for each token and head. */
const token = () => (state.heads === ALL || data.tables.by_both ? state.token : NO_TOKEN);

/** The weights shown, as `[key, weight]` pairs. */
function shown() {
  const { heads } = state;
  const { tables, total } = data;
  if (heads === ALL) return token() === NO_TOKEN ? total.all : tables.by_token(token());
  if (token() === NO_TOKEN) return heads === RETRIEVAL ? total.retrieval : tables.by_head(Number(heads));
  const rows = heads === RETRIEVAL ? data.retrieval : [Number(heads)];
  const sums = new Map();
  for (const head of rows) for (const [key, value] of tables.by_both(token() * data.heads.length + head)) sums.set(key, (sums.get(key) ?? 0) + value);
  return [...sums];
}

function shade() {
  for (const key of shaded) spans[key].style.removeProperty("--w");
  current = new Map(shown().filter(([, value]) => value > 0));
  const most = Math.max(...current.values(), Number.MIN_VALUE);
  for (const [key, value] of current) spans[key].style.setProperty("--w", Math.sqrt(value / most).toFixed(3));
  shaded = [...current.keys()];
}

/** Lists the tokens with the most attention, each with its neighbors. */
function drawPlaces() {
  const best = [...current].sort((a, b) => b[1] - a[1]).slice(0, NAMED);
  const text = (from, to) => data.tokens.slice(Math.max(0, from), to).join("").replace(/\s+/g, " ");
  $("places").replaceChildren(...best.map(([key, value]) => {
    const code = el("code", {}, text(key - BESIDE, key), el("b", {}, text(key, key + 1)), text(key + 1, key + 1 + BESIDE));
    const button = el("button", { type: "button", title: `token ${whole(key)}` }, code, ` ${weight(value)}`);
    button.addEventListener("click", () => {
      for (const old of $("prompt").querySelectorAll(".found")) old.classList.remove("found");
      spans[key].classList.add("found");
      spans[key].scrollIntoView({ block: "center" });
    });
    return el("li", {}, button);
  }));
}

function drawSegments() {
  const { names } = data.segments;
  const rows = data.segments[state.heads === RETRIEVAL ? RETRIEVAL : ALL];
  $("segments-panel").hidden = !rows.length;
  if (!rows.length) return;
  $("segments-what").textContent = data.weighted ? "The weighted sum over heads, for each generated token."
    : `The mean over ${state.heads === RETRIEVAL ? "the retrieval heads" : "all heads"}, for each generated token.`;
  $("segments").tHead.rows[0].replaceChildren(...["token", ...names].map((name) => el("th", { scope: "col" }, name)));
  const mean = names.map((_, column) => rows.reduce((sum, row) => sum + row[column], 0) / rows.length);
  const line = (name, row, chosen) => el("tr", chosen ? { class: "chosen" } : {}, el("th", { scope: "row" }, name),
    ...row.map((value) => el("td", { class: "bar", style: `--w: ${Math.max(0, Math.min(1, value)).toFixed(3)}` }, weight(value))));
  $("segments").tBodies[0].replaceChildren(line("mean", mean),
    ...rows.map((row, n) => line(el("code", {}, data.generated[n]), row, n === state.token)));
}

function draw() {
  shade();
  drawPlaces();
  drawSegments();
  const who = { [ALL]: "all heads", [RETRIEVAL]: "the retrieval heads" }[state.heads] ?? data.heads[state.heads][0];
  $("what").textContent = token() === NO_TOKEN
    ? `Attention of ${who}, summed over ${counted(data.generated.length, "generated token")}.`
      + (state.token === NO_TOKEN ? "" : " This page does not store weights of single heads for each token.")
    : `Attention of ${who} where “${data.generated[token()]}” was generated; only the tokens with the most attention are shown.`;
  for (const [n, button] of [...$("generated").children].entries()) button.setAttribute("aria-pressed", String(n === state.token));
  $("heads").value = state.heads;
  hideTip();
}

function choose(changes) {
  Object.assign(state, changes);
  draw();
}

function drawOnce() {
  const fact = (value, what) => el("li", {}, el("b", {}, value), ` ${what}`);
  const { generated, heads, retrieval, sinks, tokens } = data;
  $("facts").replaceChildren(fact(whole(generated.length), "generated tokens"), fact(whole(tokens.length), "prompt tokens"),
    fact(whole(heads.length), "heads"), fact(whole(retrieval.length), "retrieval heads"));
  $("notice").hidden = !sinks.length;
  $("notice").textContent = `${sinks.length === 1 ? "The first token is a sink: it receives" : `The first ${sinks.length} tokens are sinks: they receive`} `
    + `${percent(data.sunk)} of the attention and ${sinks.length === 1 ? "is" : "are"} excluded from the shading.`;
  spans = tokens.map((token) => el("span", {}, token || NO_TEXT));
  $("prompt").replaceChildren(...spans);
  for (const key of sinks) spans[key].classList.add("sink");
  $("generated").replaceChildren(...generated.map((token, n) => {
    const button = el("button", { type: "button", "aria-pressed": "false" }, token || NO_TEXT);
    button.addEventListener("click", () => choose({ token: state.token === n ? NO_TOKEN : n }));
    return button;
  }));
  $("heads").replaceChildren(el("option", { value: ALL }, data.weighted ? "all, weighted" : "all"),
    ...(retrieval.length ? [el("option", { value: RETRIEVAL }, "retrieval heads")] : []),
    ...heads.map(([name, module], n) => el("option", { value: n }, `${name}: ${module}`)));
  $("heads").addEventListener("change", () => choose({ heads: $("heads").value }));
  $("retrieval-what").textContent = retrieval.length
    ? "For this percentage of the generated tokens that occur in the prompt, the head’s strongest key is that token (Wu et al. 2024)."
    : "No head copies a tenth or more of the generated tokens that occur in the prompt (Wu et al. 2024).";
  $("retrieval").replaceChildren(...retrieval.map((head) => {
    const button = el("button", { type: "button" }, heads[head][0]);
    button.addEventListener("click", () => choose({ heads: String(head) }));
    return el("li", {}, button, " ", el("b", {}, percent(heads[head][2])), ` ${heads[head][1]}`);
  }));
  $("made").replaceChildren(...data.made.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** Shows the weight of the token under the pointer. */
function connectTip() {
  const places = new Map(spans.map((span, key) => [span, key]));
  $("prompt").addEventListener("pointerover", (event) => {
    const key = places.get(/** @type {any} */ (event.target));
    if (key === undefined) { hideTip(); return; }
    const value = data.sinks.includes(key) ? "a sink" : weight(current.get(key) ?? 0);
    showTip(event, [["token", data.tokens[key], value], [`position ${whole(key)}`, null, ""]]);
  });
  $("prompt").addEventListener("pointerleave", hideTip);
  addEventListener("scroll", hideTip, { passive: true });
}

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for this page; use a version from 2023 or later");
  data = JSON.parse(await unpackText("results"));
  const [by_token, by_head, by_both] = await Promise.all([data.by_token, data.by_head, data.by_both].map(strongest));
  data.tables = { by_token, by_head, by_both };
  const dense = async (grid) => Array.from((await numbers(grid)).values, (value, key) => [key, value]);
  data.total = { all: await dense(data.total.all), retrieval: await dense(data.total.retrieval) };
  drawOnce();
  connectTip();
  draw();
  $("traced").setAttribute("aria-busy", "false");
  document.documentElement.dataset.ready = "yes";
}

start().catch(showError);
