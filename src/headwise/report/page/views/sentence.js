// What a head does at a token, in one sentence made of its weights.

/** How a key lies to its query, by the patterns that labels name: name → whether it is so. */
const RELATIONS = {
  induction: (layer, query, key) => followed(layer, query, key) >= 0,
  "duplicate token": (layer, query, key) => key !== query && layer.from.tokens[query] === layer.to.tokens[key],
  "previous token": (layer, query, key) => query - key === 1,
  itself: (layer, query, key) => query === key,
  positional: (layer, query, key) => Math.abs(query - key) <= 3,
  "first token": (layer, query, key) => key === 0,
  "[CLS]": (layer, query, key) => key === 0,
};
const NEAR = ["itself", "previous token"];  // what is said of any head; the others need the head's label, or this order
const ORDER = [...NEAR, "induction", "duplicate token", "first token"];

/** The place before the key, if the query's token stands there too; else −1. */
function followed(layer, query, key) {
  const before = key - 1;
  return before >= 0 && before !== query && layer.from.tokens[query] === layer.to.tokens[before] ? before : -1;
}

/** Which pattern a key is an example of: one of the head's own labels first. */
function relationOf(row, layer, query, key) {
  if (layer.kind === "cross" || layer.from.grid) return "";
  const names = [...row.labels.map(({ label }) => label), ...ORDER].filter((name) => name in RELATIONS);
  return names.find((name) => RELATIONS[name](layer, query, key)) ?? "";
}

/** A share as whole percents; more digits where there would be none. */
const rounded = (value) => (value > 0 && value < 0.005 ? `<1\u202f%` : percent(value));

/** What the head does at a token, in words; `apart` from the text, where nothing is outlined. */
function sentence(row, layer, query, found, apart = false) {
  const name = el("b", {}, `Head ${headShort(row)}`);
  const start = [name, layer.kind === "cross" ? ` is at ${layer.from.name}’s ` : " is at ", tokenCode(layer.from, query), ". "];
  if (!found.length) return [...start, layer.rows.exact || layer.top_keys?.shape[2] ? "It looks at no key." : "Of a text of this size, single keys are not kept."];
  const [[key, value], second] = found;
  const share = el("b", {}, rounded(value));
  const target = [tokenCode(layer.to, key), " (", share, ")"];
  const tail = second && second[1] >= 0.05 ? [", then at ", tokenCode(layer.to, second[0]), ` (${rounded(second[1])}).`] : ["."];
  return [...start, ...what(row, layer, query, key, target, value, apart), ...tail];
}

function what(row, layer, query, key, target, value, apart) {
  const relation = relationOf(row, layer, query, key);
  if (relation === "induction") {
    const before = followed(layer, query, key);
    const [last, when] = before < query ? [isLast(layer, query, before), apart ? distance(layer, query, before) : "here"] : [false, "further on"];
    return [last ? "It last saw " : before < query ? "It saw " : "", tokenCode(layer.to, before),
      before < query ? ` ${when}, and looks at what followed: ` : " stands again further on, and it looks at what follows there: ", ...target];
  }
  if (relation === "duplicate token") return ["It looks at where the same token stands, ", `${distance(layer, query, key)}: `, ...target];
  if (relation === "itself" || (layer.kind === "self" && query === key)) return ["It stays on it: ", ...target];
  if (relation === "previous token") return ["It looks one token back: ", ...target];
  if (relation === "positional") return [`It looks ${distance(layer, query, key)}: `, ...target];
  if (value < 0.15) return ["It spreads its weight widely; the most goes to ", ...target];
  if (relation === "[CLS]") return ["It rests on the tokenizer’s first token: ", ...target];
  if (relation === "first token") return ["It rests on the first token: ", ...target];
  const far = distance(layer, query, key);
  return [layer.kind === "cross" ? `It looks at ${layer.to.name}’s ` : `It looks ${far ? `${far}: ` : "at "}`, ...target];
}

/** Whether a place is the last one before the query with its token. */
const isLast = (layer, query, place) => layer.to.tokens.lastIndexOf(layer.from.tokens[query], query - 1) === place;
