// The text of a head, with arcs from a token to the keys that it attends to.

import { el } from "../shared/dom.js";
import { drawn } from "../shared/draw.js";
import { fullColor, shade } from "./map.js";
import { followed, relationOf } from "./sentence.js";
import { colorButton, nextToken, pictureBox, tokenBox } from "./text.js";
import { tokenWeights } from "./weights.js";

const ARCS = 6;

/**
 * Puts a layer's text into a box, with a button for each token, unless it is already there. `tell` has callbacks for queries:
 * `over(token)` and `out()` for the pointer, `pick(token)` for clicks and keys; the promise of `pick` resolves after drawing.
 */
export function layText(box, layer, tell) {
  const streams = layer.kind === "cross" ? [layer.from, layer.to] : [layer.from];
  if (box.streams?.length === streams.length && box.streams.every((stream, index) => stream === streams[index])) return;
  box.streams = streams;
  box.replaceChildren(...streams.map((stream, index) => {
    const tokens = stream.grid ? pictureBox(stream) : tokenBox(stream);
    tokens.setAttribute("role", "group");
    tokens.setAttribute("aria-label", `${stream.name}: a button for each ${stream.grid ? "patch" : "token"}; arrow keys move`);
    tokens.dataset.side = streams.length > 1 ? ["queries", "keys"][index] : "both";
    if (index === 0) hearTokens(tokens, stream, tell);
    return streams.length > 1 ? el("div", {}, el("h3", {}, `${stream.name}: ${index ? "keys" : "queries"}`), tokens) : tokens;
  }), drawn("svg", { class: "over", "aria-hidden": "true" }));
}

function hearTokens(box, stream, { over, out, pick }) {
  const at = ({ target }) => target.closest("[data-token]")?.dataset.token;
  box.addEventListener("pointerover", (event) => {
    if (at(event) !== undefined && event.pointerType !== "touch") over(Number(at(event)));
  });
  box.addEventListener("pointerleave", out);
  box.addEventListener("click", (event) => {
    if (at(event) !== undefined) pick(Number(at(event)));
  });
  box.addEventListener("keydown", (event) => {
    const next = nextToken(event, stream);
    if (next === undefined) return;
    event.preventDefault();
    pick(next).then(() => box.querySelector(`[data-token="${next}"]`).focus());
  });
}

/** Colors the keys, outlines the token and, for induction, its other occurrence, and draws the arcs. */
export function drawArcs(box, row, rows, token, found) {
  const { layer } = rows;
  const weights = tokenWeights(rows, token, "to");
  const top = fullColor(weights);
  const side = (name) => box.querySelector(`[data-side="${name}"]`) ?? box.querySelector('[data-side="both"]');
  const [queries, keys] = [side("queries"), side("keys")];
  const seen = found.length && relationOf(row, layer, token, found[0]) === "induction" ? followed(layer, token, found[0][0]) : -1;
  for (const group of new Set([queries, keys])) {
    for (const button of group.querySelectorAll("[data-token]")) {
      const index = Number(button.dataset.token);
      colorButton(button, group === keys ? shade(weights[index] / top) : 0);
      const here = group === queries && index === token;
      button.setAttribute("aria-pressed", String(here));
      button.tabIndex = here || (group !== queries && index === 0) ? 0 : -1;
      button.classList.toggle("seen", group === keys && index === seen);
    }
  }
  bringIntoBox(box, queries.querySelector(`[data-token="${token}"]`), found.length && keys.querySelector(`[data-token="${found[0][0]}"]`));
  const svg = box.querySelector("svg.over");
  svg.setAttribute("width", box.scrollWidth);
  svg.setAttribute("height", 0);
  svg.setAttribute("height", box.scrollHeight);
  const from = middle(box, queries.querySelector(`[data-token="${token}"]`));
  const gutters = layer.from.grid || layer.to.grid ? null : guttersOf(box);
  const shown = found.filter(([key, value]) => value >= 0.02 && !(key === token && queries === keys)).slice(0, ARCS);
  svg.replaceChildren(...shown.reverse().map(([key, value]) => arc(from, middle(box, keys.querySelector(`[data-token="${key}"]`)), value, gutters)));
}

/** A token's place within the scrolled box: its horizontal center, and its upper and lower edges. */
function middle(box, button) {
  const [outer, inner] = [box.getBoundingClientRect(), button.getBoundingClientRect()];
  const x = inner.left + inner.width / 2 - outer.left + box.scrollLeft;
  return { x, top: inner.top - outer.top + box.scrollTop, bottom: inner.bottom - outer.top + box.scrollTop };
}

const BETWEEN = 24;  // tokens whose edges are closer than this, in pixels, have no line of text between them

/** The x positions, left and right of the text, where arcs that pass a line of text run vertically. */
function guttersOf(box) {
  const [outer, ...inner] = [box, ...box.querySelectorAll(".tokens")].map((one) => one.getBoundingClientRect());
  return [inner[0].left - outer.left + 9, inner[0].left - outer.left + inner[0].width - 9];
}

/** An arc from a token to a key, thicker for larger weights: between lines of text, and beside the text where it passes one. */
function arc(from, to, value, gutters) {
  const level = Math.abs(from.top - to.top) < 8;
  const up = level || from.top > to.top;
  const [start, end] = up ? [from.top, level ? to.top : to.bottom] : [from.bottom, to.top];
  return drawn("g", { class: "arc", "data-weight": value.toFixed(3), opacity: 0.35 + 0.65 * Math.sqrt(value) },
    drawn("path", { d: arcPath(from.x, start, to.x, end, { level, up, gutters }), "stroke-width": 1 + 4 * value }),
    drawn("circle", { cx: to.x, cy: end, r: 2.2 + 1.8 * value }));
}

function arcPath(x, y, goalX, goalY, { level, up, gutters }) {
  if (level) {
    const rise = Math.min(13, 6 + Math.abs(x - goalX) / 12);
    return `M${x} ${y}C${x} ${y - rise} ${goalX} ${goalY - rise} ${goalX} ${goalY}`;
  }
  if (!gutters || Math.abs(y - goalY) < BETWEEN) {
    const middle = (y + goalY) / 2;
    return `M${x} ${y}C${x} ${middle} ${goalX} ${middle} ${goalX} ${goalY}`;
  }
  const way = up ? -1 : 1;
  const [left, right] = gutters;
  const side = x + goalX < left + right ? left : right;
  const [out, back] = [y + 5 * way, goalY - 5 * way];
  const turn = 6 * Math.sign(side - x);
  return `M${x} ${y}Q${x} ${out} ${x + turn} ${out}H${side - turn}Q${side} ${out} ${side} ${out + 6 * way}V${back - 6 * way}`
    + `Q${side} ${back} ${side - turn} ${back}H${goalX + turn}Q${goalX} ${back} ${goalX} ${goalY}`;
}

/** Scrolls the box, never the page, to show the token and, if both fit, its strongest key. */
function bringIntoBox(box, button, key) {
  if (box.scrollHeight <= box.clientHeight + 1) return;
  const [at, other] = [middle(box, button), key ? middle(box, key) : null];
  const [top, bottom] = other && Math.max(at.bottom, other.bottom) - Math.min(at.top, other.top) < box.clientHeight - 50
    ? [Math.min(at.top, other.top), Math.max(at.bottom, other.bottom)] : [at.top, at.bottom];
  if (top - 30 < box.scrollTop) box.scrollTop = top - 30;
  else if (bottom + 12 > box.scrollTop + box.clientHeight) box.scrollTop = bottom + 12 - box.clientHeight;
}
