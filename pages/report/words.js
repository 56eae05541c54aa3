// Formatting of metrics, tokens and positions in a text or an image.

import { el } from "../shared/dom.js";
import { counted, percent, subscripts } from "../shared/words.js";

/**
 * A metric's value as text, with a number of digits that suits the largest value of its column.
 * @param {number | null | undefined} value
 * @param {Column} [column]
 */
export function figure(value, column) {
  if (typeof value !== "number") return "–";
  return value.toFixed(column?.digits ?? 2).replace("-", "−");
}

export const formula = (text) => el("span", { class: "formula" }, ...subscripts(text));

/** A token with its spaces, line ends and unprintable characters made visible. */
export function visible(token) {
  const plain = { "\n": "↵", " ": "·", "\t": "⇥", "\r": "␍" };
  return token.replace(/[\n\t\r ]|[\p{C}\p{Z}]/gu, (mark) => plain[mark] ?? `\\u{${mark.codePointAt(0).toString(16)}}`) || "∅";
}

/**
 * The name of a token: its characters in the text or, if it has none, the tokenizer's own form of it.
 * @param {Stream} stream
 * @param {number} index
 */
export function tokenName(stream, index) {
  const piece = stream.apart ? stream.tokens[index].trim() : stream.pieces?.[index];
  return visible(piece ? piece.trim() || piece : stream.tokens[index]);
}

/**
 * A cell of an axis in words: the token, or the first and the last of its block.
 * @param {Stream} stream
 * @param {Axis} axis
 * @param {number} cell
 */
export function cellLabel(stream, axis, cell) {
  const [first, end] = [axis.start(cell), axis.start(cell + 1)];
  const name = tokenName(stream, first);
  return end - first === 1 ? name : `${name} … ${tokenName(stream, end - 1)}`;
}

export function cellPlace(axis, cell) {
  const [first, end] = [axis.start(cell), axis.start(cell + 1)];
  return end - first === 1 ? `${first}` : `${first}–${end - 1}`;
}

/**
 * The distance of a key from its query in words; for patches, in rows and columns.
 * @param {Layer} layer
 * @param {number} query
 * @param {number} key
 */
export function distance(layer, query, key) {
  if (layer.kind === "cross") return "";
  if (layer.from.grid) return patchDistance(layer.from, query, key);
  return query === key ? "itself" : query > key ? `${query - key} back` : `${key - query} ahead`;
}

/** The number of tokens of an image that come before its patches. */
export const beforePatches = ({ tokens, grid: [rows, columns] }) => tokens.length - rows * columns;

/**
 * @param {Stream} stream
 * @param {number} query
 * @param {number} key
 */
function patchDistance(stream, query, key) {
  if (query === key) return "itself";
  const [from, to] = [query, key].map((index) => index - beforePatches(stream));
  if (Math.min(from, to) < 0) return "";
  const columns = stream.grid[1];
  const [down, right] = [Math.floor(to / columns) - Math.floor(from / columns), (to % columns) - (from % columns)];
  const part = (by, word, one, other) => (by ? [`${counted(Math.abs(by), word)} ${by > 0 ? one : other}`] : []);
  return [...part(down, "row", "down", "up"), ...part(right, "column", "right", "left")].join(", ");
}

export const tokenCode = (stream, index) => el("code", { class: "token" }, tokenName(stream, index));

/** A fraction in whole percent; `<1 %` if it is above 0 but would round to 0. */
export const rounded = (value) => (value > 0 && value < 0.005 ? `<1\u202f%` : percent(value));

/** A difference with its sign; one too small for the column's digits has two significant digits. */
export function signed(value, column) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const small = size < 1e-4 ? value.toExponential(1) : value.toPrecision(2);
  return (value > 0 ? "+" : "") + (size < 10 ** -column.digits ? small.replaceAll("-", "−") : figure(value, column));
}
