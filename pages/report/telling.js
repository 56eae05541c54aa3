// Heads and tokens that are worth showing first.

import { data } from "./look.js";
import { isClear, isExample, visibleKeys } from "./sentence.js";
import { strongest } from "./weights.js";

/** For each label found, in the order of the rules: its heads, the strongest first, and the label of that head. */
export const bestExamples = () => Object.entries(data.labeled).map(([name, rows]) => ({
  name, rows, label: data.rows[rows[0]].labels.find(({ label }) => label === name),
}));

/**
 * A query worth showing first: preferably a word with a clear weight on a key that matches the head's first label.
 * @param {Row} row
 * @param {HeadRows} rows
 */
export function tellingToken(row, rows) {
  const { layer } = rows;
  const count = layer.from.tokens.length;
  let [best, most] = [count - 1, 0];
  for (let query = Math.min(count - 1, 1); query < count; query++) {
    const [key, value] = strongest(rows, query)[0] ?? [0, 0];
    if (layer.from.special.includes(query)) continue;
    const named = row.labels.findIndex((label) => isExample(label, layer, query, key));
    const both = [layer.from.tokens[query], layer.to.tokens[key]];
    const letters = both.every((token) => /\p{L}/u.test(token)) ? (both.every((token) => /\p{L}{3}/u.test(token)) ? 2.6 : 2) : 1;
    const worth = value * (named >= 0 ? 8 / 4 ** named : key === 0 || key === query ? 0.3 : 1) * letters * (query >= count / 4 ? 1.2 : 1)
      * (isClear(value, visibleKeys(layer, query)) ? 1 : 0.1);
    if (worth > most) [best, most] = [query, worth];
  }
  return best;
}
