// One sentence that describes what a head does at a token, from its weights.

import { el } from "../shared/dom.js";
import { headName, whole } from "../shared/words.js";
import { OFFSET_OF } from "./proof.js";
import { distance, rounded, tokenCode } from "./words.js";

/**
 * The patterns that labels describe: a test whether a key matches, the wording and, for patterns that can be named for any
 * head, the metric that is the mean weight. `by` is the offset of a positional label.
 * @type {Record<string, { holds(layer: Layer, query: number, key: number, by?: number): boolean, words(layer: Layer, query: number, key: number): string, key?: string }>}
 */
const RELATIONS = {
  induction: {
    holds: (layer, query, key) => followed(layer, query, key) >= 0,
    words: (layer, query, key) => `the token after ${occurrence(layer, query, followed(layer, query, key))}`, key: "induction",
  },
  "duplicate token": {
    holds: (layer, query, key) => key !== query && layer.from.tokens[query] === layer.to.tokens[key],
    words: occurrence, key: "same_token",
  },
  "previous token": { holds: (_, query, key) => query - key === 1, words: () => "the previous token", key: "previous" },
  self: { holds: (_, query, key) => query === key, words: () => "itself", key: "self" },
  positional: { holds: (_, query, key, by) => key - query === by, words: (layer, query, key) => `the token ${distance(layer, query, key)}` },
  "first token": { holds: (_, query, key) => key === 0, words: () => "the first token", key: "first" },
  "[CLS]": { holds: (_, query, key) => key === 0, words: () => "the first token" },
  "special tokens": { holds: (layer, _, key) => key > 0 && layer.to.special.includes(key), words: () => "a special token" },
  punctuation: { holds: ({ to }, _, key) => /^[ \t]*[\p{P}\n\r]+[ \t]*$/u.test(to.pieces?.[key] ?? to.tokens[key]), words: () => "punctuation" },
};
const ORDER = ["self", "previous token", "induction", "duplicate token", "first token"];  // patterns that can be named for any head, in this order
const OF_PATCHES = ["self", "[CLS]", "special tokens"];  // the only ones named for an image, whose patches have no reading order

/** The position before the key if it holds the same token as the query, else −1. */
export function followed(layer, query, key) {
  const before = key - 1;
  return before >= 0 && before !== query && layer.from.tokens[query] === layer.to.tokens[before] ? before : -1;
}

/** Describes another occurrence of the query's token. */
function occurrence(layer, query, place) {
  if (place > query) return "a later occurrence of it";
  return layer.to.tokens.lastIndexOf(layer.from.tokens[query], query - 1) === place ? "its previous occurrence" : "an earlier occurrence of it";
}

/**
 * Returns true if a key matches the pattern of a label.
 * @param {{ label: string, key?: string }} label
 * @param {Layer} layer
 * @param {number} query
 * @param {number} key
 */
export const isExample = ({ label, key: figure }, layer, query, key) => Boolean(RELATIONS[label]?.holds(layer, query, key, OFFSET_OF[figure]));

/**
 * The pattern that a query's strongest key clearly matches, trying the head's own labels first; undefined if there is none.
 * @param {Row} row
 * @param {Layer} layer
 * @param {number} query
 * @param {[key: number, weight: number]} found
 */
export function relationOf(row, layer, query, [key, value]) {
  if (layer.kind === "cross" || !isClear(value, visibleKeys(layer, query))) return undefined;
  const names = [...row.labels, ...ORDER.map((label) => ({ label }))];
  return names.find((one) => (!layer.from.grid || OF_PATCHES.includes(one.label)) && isExample(one, layer, query, key))?.label;
}

/**
 * The number of keys that a query can attend to.
 * @param {Layer} layer
 * @param {number} query
 */
export const visibleKeys = ({ causal, to, visible }, query) => visible?.[query] ?? (causal ? query + 1 : to.tokens.length);

const CLEAR = { keys: 8, timesUniform: 3, share: 0.15 };

/** Returns true if a weight is informative: far above uniform attention, with enough keys to choose from. */
export const isClear = (value, keys) => keys >= CLEAR.keys && value >= Math.max(CLEAR.share, CLEAR.timesUniform / keys);

/**
 * Describes what the head does at a token. A pattern is named only if the weight is clear.
 * @param {Row} row
 * @param {Layer} layer
 * @param {number} query
 * @param {[key: number, weight: number][]} found
 */
export function sentence(row, layer, query, found) {
  const cross = layer.kind === "cross";
  const start = [el("b", {}, `Head ${headName(row)}`), cross ? ` at ${layer.from.name}’s ` : " at ", tokenCode(layer.from, query)];
  if (!found.length) return [...start, layer.rows.exact || layer.top_keys?.shape[2] ? " attends to no key." : ": single keys are not stored for a text of this size."];
  const [[key, value], second] = found;
  const keys = visibleKeys(layer, query);
  const clear = isClear(value, keys);
  const relation = relationOf(row, layer, query, found[0]);
  const labeled = row.labels.some(({ label }) => label === relation);
  const verb = !clear ? " puts its largest weight on " : relation && !labeled ? " attends here to " : " attends to ";
  const far = query === key && !cross ? "at the same position" : distance(layer, query, key);
  return [...start, verb, ...(relation ? [RELATIONS[relation].words(layer, query, key), ": "] : cross ? [`${layer.to.name}’s `] : []),
    tokenCode(layer.to, key), " (", el("b", {}, rounded(value)), ")", relation || !far ? "" : `, ${far}`,
    ...(second && second[1] >= 0.05 ? [clear ? ", then to " : ", then on ", tokenCode(layer.to, second[0]), ` (${rounded(second[1])})`] : []), ".",
    clear ? relation && !labeled ? meanWords(row, layer, relation) : "" : uniformWords(keys)];
}

/**
 * The sentence about the head's mean weight on a pattern that it has no label for; empty if the mean is unknown.
 * @param {Row} row
 * @param {Layer} layer
 * @param {string} relation
 */
function meanWords(row, { isTwin }, relation) {
  const mean = row[RELATIONS[relation].key + (isTwin ? "_random" : "")];
  return typeof mean === "number" ? ` On average over queries: ${rounded(mean)}.` : "";
}

/** The sentence about the weight that uniform attention would put on each key. */
const uniformWords = (keys) => (keys === 1 ? " It can attend to no other key." : ` Uniform attention would put ${rounded(1 / keys)} on each of its ${whole(keys)} keys.`);
