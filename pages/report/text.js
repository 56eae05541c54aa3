// The text or image: what a token attends to, what attends to it, or the total attention that each token receives.

import { $, css, el, switches } from "../shared/dom.js";
import { contrast, hex, inkOn, luminance } from "../shared/draw.js";
import { weight, whole } from "../shared/words.js";
import { chooseToken, redraw, remember } from "./choice.js";
import { data } from "./look.js";
import { fullColor, scaleWords, shade } from "./map.js";
import { repeatOf } from "./proof.js";
import { chosen, state } from "./state.js";
import { headRows, receivedBy, tokenWeights, topKeys } from "./weights.js";
import { beforePatches, distance, tokenCode, tokenName, visible } from "./words.js";

/** @type {HeadRows[]} */
let textShown;  // the heads whose mean is shown: one, or all of the layer

/** Loads the heads whose mean the text shows. */
export function loadText() {
  const row = chosen();
  return Promise.all((state.scope === "head" ? [row] : data.rows.filter(({ layer }) => layer === row.layer)).map((one) => headRows(one)));
}

export function drawText(heads) {
  textShown = heads;
  drawTextTitle();
  drawStreams();
  colorTokens();
}

function drawTextTitle() {
  const row = chosen();
  const { layer } = textShown[0];
  const cross = layer.kind === "cross";
  $("text-title").textContent = state.scope === "head" ? `On ${layer.isTwin ? "repeated random tokens" : layer.from.grid ? "the image" : "the text"}` : `Layer ${row.layer}, mean of its ${layer.maps.shape[0]} heads`;
  switches($("scopes"), "scope", [["head", "this head"], ["layer", "all heads of the layer"]], state.scope,
    (scope) => { state.scope = scope; remember(); redraw(); });
  const directions = [["to", "attends to"], ["from", "is attended to by"], ["all", "total received"]];
  switches($("directions"), "direction", directions, state.direction, (direction) => {
    if (cross && (direction === "to") !== (state.direction === "to")) state.token = 0;
    chooseToken(state.token, direction);
  });
  const places = layer.from.positions
    ? ` This layer attends over ${whole(layer.from.tokens.length)} positions at a time (for example a window), so tokens are shown as position numbers.` : "";
  const block = layer.rows.exact && layer.cols.exact ? "" : " Except for the strongest keys, weights are means over blocks of tokens (≈).";
  $("text-what").textContent = {
    to: "Select a token; the others are colored by its weight on them.",
    from: "Select a token; the others are colored by their weight on it.",
    all: "Each token is colored by the total attention it receives from all queries.",
  }[state.direction] + places + block + (rawWords(layer) && ` ${rawWords(layer)}`);
}

/**
 * A note if tokens are not shown as they are written in the text, else empty.
 * @param {Layer} layer
 */
export const rawWords = ({ from, to }) => ([from, to].some((stream) => !stream.pieces && !stream.apart && !stream.grid && !stream.positions)
  ? "Tokens are shown as the tokenizer writes them because it does not give their positions in the text. " : "");

/** Draws the token boxes of the layer's streams; rebuilds them only when the streams change. */
function drawStreams() {
  const { layer } = textShown[0];
  const streams = layer.kind === "cross" ? [layer.from, layer.to] : [layer.from];
  const box = $("streams");
  if (box.streams?.length === streams.length && box.streams.every((stream, index) => stream === streams[index])) return;
  box.streams = streams;
  box.replaceChildren(...streams.map((stream, index) => {
    const cross = streams.length > 1;
    const name = cross ? `${stream.name}: ${index ? "keys" : "queries"}` : stream.name;
    const tokens = stream.grid ? pictureBox(stream) : tokenBox(stream);
    tokens.setAttribute("role", "group");
    tokens.setAttribute("aria-label", `${name}; a button for each ${stream.grid ? "patch" : "token"}; arrow keys move`);
    tokens.dataset.side = index === 0 && cross ? "queries" : index ? "keys" : "both";
    connectTokens(tokens, stream);
    return cross ? el("div", {}, el("h3", {}, name), tokens) : tokens;
  }));
}

// --- the tokens --------------------------------------------------------------------------------

/** The text as it was written, with a button for each token; the tokens of a word stay on one line if they fit. */
export function tokenBox(stream) {
  const box = el("div", { class: "tokens" });
  let word = null;
  const apart = (...nodes) => { box.append(...nodes); word = null; };
  const again = stream.apart ? repeatOf(stream) : null;
  stream.tokens.forEach((token, index) => {
    const special = stream.special.includes(index);
    if (again && index === again.first + again.period) apart("\n");
    const piece = stream.apart ? tokenName(stream, index) : special || stream.positions ? token : stream.pieces?.[index] ?? token;
    const [, before, letters, after] = piece.match(/^([ \t\r\n]*)([^]*?)([ \t\r\n]*)$/);
    if (before && letters) apart(before);
    const button = tokenButton(stream, index, letters || piece, special);
    button.classList.toggle("inside", word !== null);
    if (!word) box.append(word = el("span"));
    word.append(button);
    const blanks = letters ? after : piece;
    if (blanks.includes("\n")) apart(blanks.slice(blanks.indexOf("\n")));
    else if (blanks || stream.positions || stream.apart || special) apart(letters ? blanks || " " : "");
  });
  return box;
}

function tokenButton(stream, index, letters, special) {
  const button = el("button", { type: "button", tabindex: -1, "aria-pressed": "false", "data-token": index, class: special ? "special" : "" });
  const shown = letters.trim() ? letters.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (mark) => (mark === "\n" ? mark : visible(mark))) : visible(letters);
  if (letters.trim()) button.append(shown);
  else {
    // Whitespace and the later bytes of a character are invisible, so show a mark.
    button.append(el("s", {}, letters ? shown : "·"));
    button.setAttribute("aria-label", letters ? shown : `token ${index}, ${visible(stream.tokens[index])}`);
  }
  return button;
}

/** A picture under the grid of its patches, with other tokens above it. */
export function pictureBox(stream) {
  const [rows, columns] = stream.grid;
  const first = beforePatches(stream);
  const grid = el("div", { class: "patches" });
  grid.style.gridTemplateColumns = `repeat(${columns}, 1fr)`;
  grid.style.maxWidth = `${Math.min(620, Math.round((560 * columns) / rows))}px`;
  if (stream.picture) {
    const picture = el("img", { alt: "The picture that the model was given", src: `data:image/png;base64,${stream.picture}` });
    grid.append(picture);
  }
  const patch = (index) => el("button", {
    type: "button", tabindex: -1, "aria-pressed": "false", "data-token": index, "aria-label": `patch ${stream.tokens[index]}`,
  });
  grid.append(...Array.from({ length: rows * columns }, (_, n) => patch(first + n)));
  const others = el("div", { class: "tokens" });
  for (let index = 0; index < first; index++) others.append(el("span", {}, tokenButton(stream, index, stream.tokens[index], true)), " ");
  return el("div", { class: "picture" }, ...(first ? [others] : []), grid);
}

/** The token that a key press moves to; undefined for other keys. */
export function nextToken(event, stream) {
  const at = Number(event.target.closest("[data-token]")?.dataset.token);
  const count = stream.tokens.length;
  const down = stream.grid && at >= beforePatches(stream) ? stream.grid[1] : 1;
  const step = { ArrowLeft: -1, ArrowUp: -down, ArrowRight: 1, ArrowDown: down }[event.key];
  const goal = { Home: 0, End: count - 1 }[event.key] ?? (step && at + step);
  return goal === undefined || Number.isNaN(goal) ? undefined : Math.max(0, Math.min(count - 1, goal));
}

function connectTokens(box, stream) {
  const direction = () => (box.dataset.side === "both" || (state.direction === "all" && box.dataset.side === "keys") ? state.direction
    : box.dataset.side === "queries" ? "to" : "from");
  box.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-token]");
    if (button) chooseToken(Number(button.dataset.token), direction());
  });
  box.addEventListener("pointerover", ({ target, pointerType }) => {
    const button = target.closest("[data-token]");
    if (!button || pointerType === "touch") return;
    const index = Number(button.dataset.token);
    const verb = { to: "gets", from: "gives", all: "receives" }[state.direction];
    $("text-scale").replaceChildren(tokenCode(stream, index), ` at ${index}`, button.dataset.weight ? ` ${verb} ${button.dataset.weight}` : "");
  });
  box.addEventListener("pointerleave", sayScale);
  box.addEventListener("keydown", (event) => {
    const next = nextToken(event, stream);
    if (next === undefined) return;
    event.preventDefault();
    box.querySelector(`[data-token="${next}"]`).focus();
    chooseToken(next, direction());
  });
}

// --- their colors -----------------------------------------------------------------------------

/** The weights that the boxes show for the chosen token and direction, averaged over the heads shown. */
function shownWeights() {
  const each = textShown.map((rows) => (state.direction === "all" ? receivedBy(rows) : tokenWeights(rows, state.token, state.direction)));
  return each[0].map((_, index) => each.reduce((sum, weights) => sum + weights[index], 0) / each.length);
}

/** Colors a token with a fraction of the full color, and its text with a color that is readable on it. */
export function colorButton(button, share) {
  const strength = Math.max(0, Math.min(1, share));
  button.style.setProperty("--w", strength.toFixed(3));
  if (button.closest(".patches")) return;
  const [panel, color] = [hex(css("--panel")), css("--token").split(" ").map(Number)];
  const under = panel.map((part, index) => part + strength * (color[index] - part));
  const plain = css(button.classList.contains("special") ? "--muted" : "--ink");
  const readable = contrast(luminance(hex(plain)), luminance(under)) >= 4.6;
  button.style.color = readable ? "" : inkOn(under);
}

let textScale = "";
const sayScale = () => { $("text-scale").textContent = textScale; };

function colorTokens() {
  const { layer } = textShown[0];
  const weights = shownWeights();
  const top = state.direction === "all" ? Math.max(...weights, 1e-9) : fullColor(weights);
  const colored = state.direction === "from" ? "queries" : "keys";
  const picked = state.direction === "to" ? "queries" : "keys";
  for (const box of $("streams").querySelectorAll("[data-side]")) {
    const both = box.dataset.side === "both";
    for (const button of box.querySelectorAll("[data-token]")) {
      const index = Number(button.dataset.token);
      const mine = both || box.dataset.side === colored;
      colorButton(button, mine ? shade(weights[index] / top) : 0);
      button.dataset.weight = mine ? weight(weights[index]) : "";
      const here = index === state.token && (both || box.dataset.side === picked);
      button.setAttribute("aria-pressed", String(here));
      button.tabIndex = here || (!both && box.dataset.side !== picked && index === 0) ? 0 : -1;
    }
  }
  textScale = state.direction === "all" ? `Full color is the largest attention that a token receives, ${weight(top)}.` : scaleWords(top);
  sayScale();
  drawStrongest(layer, weights);
  keepInSight(picked);
}

/** Scrolls the box, never the page, so that the chosen token is visible. */
function keepInSight(picked) {
  const box = $("streams").querySelector(`.tokens[data-side="${picked}"], .tokens[data-side="both"]`);
  const button = box?.querySelector('[aria-pressed="true"]');
  if (!button) return;
  const [top, bottom] = [button.offsetTop, button.offsetTop + button.offsetHeight];
  if (top < box.scrollTop) box.scrollTop = top - 8;
  else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight + 8;
}

function drawStrongest(layer, weights) {
  const [mine, other] = { to: [layer.from, layer.to], from: [layer.to, layer.from], all: [layer.to, layer.to] }[state.direction];
  const found = [...weights].map((value, index) => [index, value]).filter(([, value]) => value > 0)
    .sort((a, b) => b[1] - a[1]).slice(0, 10);
  const verb = { to: "attends to", from: "is attended to by" }[state.direction];
  $("strongest-title").replaceChildren(...(verb ? [tokenCode(mine, state.token), ` at ${state.token} ${verb}`] : ["Most attended tokens"]));
  const exact = layer.rows.exact && layer.cols.exact;
  const tops = new Set(textShown.length > 1 ? [] : state.direction === "to" ? topKeys(textShown[0], state.token).map(([key]) => key)
    : found.map(([query]) => query).filter((query) => topKeys(textShown[0], query).some(([key]) => key === state.token)));
  const about = (index) => !exact && state.direction !== "all" && !tops.has(index);
  const aside = (index) => [verb ? (state.direction === "to" ? distance(layer, state.token, index) : distance(layer, index, state.token)) : "", `at ${index}`]
    .filter(Boolean).join(" · ");
  const next = layer.kind === "cross" ? { to: "from", from: "to", all: "from" }[state.direction] : state.direction;
  $("strongest").replaceChildren(...weightList(other, found, aside, next, about));
  const rest = 1 - found.reduce((sum, [, value]) => sum + value, 0);
  $("strongest-rest").textContent = state.direction !== "to" || !exact ? "" : rest > 0.0005 ? `${weight(rest)} on all other keys.` : "No weight on other keys.";
}

/** List items for `[index, weight]` pairs: weight, token (a button) and note. `about(index)` is true if the weight is a mean. */
function weightList(stream, found, aside, direction, about) {
  return found.map(([index, value]) => {
    const button = el("button", { type: "button", class: "plain" }, tokenCode(stream, index));
    button.addEventListener("click", () => chooseToken(index, direction));
    return el("li", {}, el("b", {}, `${about(index) ? "≈" : ""}${weight(value)}`), button, el("small", {}, aside(index)));
  });
}
