// The evidence for a label: where its pattern is in a map, how much weight is there, and the weight at each offset.

import { roundTicks } from "../shared/chart.js";
import { $ } from "../shared/dom.js";
import { showTip } from "../shared/tip.js";
import { whole } from "../shared/words.js";
import { overRows } from "./labels.js";
import { data } from "./look.js";
import { picture } from "./save.js";
import { figure } from "./words.js";

/** The offset of the key from the query for each positional metric. */
export const OFFSET_OF = { back_3: -3, back_2: -2, previous: -1, self: 0, next: 1, ahead_2: 2, ahead_3: 3 };

/**
 * Where random tokens repeat: the first position, the end, and the number of tokens before they repeat.
 * @param {Stream} stream
 */
export function repeatOf({ tokens, special }) {
  const first = [...tokens.keys()].find((index) => !special.includes(index)) ?? 0;
  let end = tokens.length;
  while (end > first && special.includes(end - 1)) end--;
  const again = (period) => tokens.slice(first, end - period).every((token, index) => token === tokens[first + index + period]);
  let period = Math.ceil((end - first) / 2);
  while (period < end - first && !again(period)) period++;
  return { first, end, period };
}

/**
 * The place where a label's weight is expected: in words, and as lines `[key, query, key, query]` from cell to cell; undefined if
 * it is not a line.
 * @param {Label} label
 * @param {Layer} layer
 * @returns {{ where: string, lines: number[][] } | undefined}
 */
export function expected({ label, key }, layer) {
  const [n, m] = [layer.rows.cells, layer.cols.cells];
  if (!layer.rows.exact || !layer.cols.exact || layer.kind === "cross") return undefined;
  if (key === "first" || key === "cls") return { where: "the first token", lines: [[0, 0, 0, n - 1]] };
  if (key in OFFSET_OF) {
    const by = OFFSET_OF[key];
    return {
      where: by === 0 ? "the token itself" : `the token ${Math.abs(by)} ${by < 0 ? "back" : "ahead"}`,
      lines: [[Math.max(0, by), Math.max(0, -by), m - 1 + Math.min(0, by), n - 1 - Math.max(0, by)]],
    };
  }
  if (!layer.isTwin || !["induction", "duplicate token"].includes(label)) return undefined;
  const { first, end, period } = repeatOf(layer.from);
  const next = label === "induction" ? 1 : 0;
  const back = [first + next, first + period, end - 1 - period + next, end - 1];
  return {
    where: `${next ? "the token after " : ""}the other copy of the token`,
    lines: layer.causal ? [back] : [back, [first + period + next, first, end - 1, end - 1 - period - next]],
  };
}

/** A head's first label whose pattern is a line on this map, and where that line is. */
function shownLabel(row, layer) {
  return row.labels.map((label) => ({ label, ...expected(label, layer) })).find(({ lines }) => lines);
}

/** The guide lines of a head's first label whose pattern is a line on this map. */
export const guidesOf = (row, layer) => shownLabel(row, layer)?.lines ?? [];

/** The mean weight of a map along lines of cells. */
function massOn(lines, layer, map) {
  let [sum, count] = [0, 0];
  for (const [key, query, end, last] of lines) {
    const across = key === end && last > query ? 0 : 1;
    for (let step = 0; query + step <= last; step++, count++) sum += map[(query + step) * layer.cols.cells + key + across * step];
  }
  return count ? sum / count : NaN;
}

/**
 * Explains the dashed line, and says how much of the weight is on it here.
 * @param {Row} row
 * @param {Layer} layer
 * @param {Float32Array} map
 */
export function guideWords(row, layer, map) {
  const shown = shownLabel(row, layer);
  if (!shown) {
    const hidden = row.labels.find(({ key }) => key.endsWith("_random"));
    return hidden && !layer.isTwin && row.of.twin ? `Its label ${hidden.label} is based on repeated random tokens; switch to them to see the pattern.` : "";
  }
  const { label, where, lines } = shown;
  const mean = overRows(label.key);  // the label's score covers more than the input shown
  return `Dashed: where a head labeled ${label.label} attends (${where}). On ${pieceName(layer)}, ${figure(massOn(lines, layer, map))} of a query’s weight `
    + `is on it, on average${mean ? `; the label’s ${figure(label.score, data.column.get(label.key))} is ${mean.slice(2)}` : ""}.`;
}

/** The input that a layer is shown on, in words. */
function pieceName(layer) {
  if (!layer.isTwin) return data.provenance.texts > 1 ? "the first text" : layer.from.grid ? "this image" : "this text";
  const { first, period } = repeatOf(layer.from);
  const tokens = layer.from.tokens.slice(first, first + period);
  return `this piece of ${whole(period)} ${new Set(tokens).size === period ? "different " : ""}random tokens${tokens.every((token) => /^\s*\p{L}+$/u.test(token)) ? ", all made of letters" : ""}`;
}

/** Draws the weight at offsets from 3 back to 3 ahead, on which positional labels are based. */
export function drawProfile(row) {
  const there = Object.entries(OFFSET_OF).filter(([key]) => typeof row[key] === "number");
  $("profile-panel").hidden = there.length < 2 || Boolean(row.of.from.grid);
  if ($("profile-panel").hidden) return;
  const limit = data.rules.find(({ key }) => key in OFFSET_OF)?.threshold;
  const shares = there.map(([key, by]) => [by, row[key]]);
  const names = there.map(([, by]) => [by, by === 0 ? "itself" : `${by > 0 ? "+" : "−"}${Math.abs(by)}`]);
  picture("profile", {
    width: $("profile").clientWidth, height: 220, margin: { l: 44, r: 10, t: 8, b: 40 }, bars: shares,
    x: { title: "tokens from the query", range: [shares[0][0] - 0.6, shares.at(-1)[0] + 0.6], ticks: names },
    y: { title: "share", range: [0, Math.max(1, ...shares.map(([, share]) => share))], ticks: roundTicks(0, 1, 4), lines: true },
    lines: limit ? [{ points: [[shares[0][0] - 0.6, limit], [shares.at(-1)[0] + 0.6, limit]], color: "--mark", width: 1.2, dash: "4 4" }] : [],
    hover: (event, { column }) => {
      const found = shares.find(([by]) => by === column);
      if (found) showTip(event, [["tokens from the query", null, `${found[0]}`], ["share", null, found[1].toFixed(3)]]);
    },
  }).setAttribute("aria-label", `Share of the weight by offset: ${shares.map(([by, share]) => `${by}: ${share.toFixed(2)}`).join(", ")}`);
  $("profile-what").textContent = limit ? `Dashed: the threshold ${limit} of positional labels such as previous token and self.` : "";
}
