// The changes between two looks: sentences, with the largest change first, and means per layer.

import { el } from "../shared/dom.js";
import { unitName } from "../shared/words.js";
import { glyph } from "./labels.js";
import { hasLabel, known, runs } from "./look.js";
import { figure, signed } from "./words.js";

export const nameOf = (row) => `${row.module}.${row.head}`;

/**
 * The row in look `run` of the same head as a row of either look; undefined if there is none.
 * @param {Row} row
 * @param {number} run
 */
export const sameHead = (row, run) => runs[run].rows[runs[run].byName.get(nameOf(row))];

/** Pairs of rows with the same module and head number in A and in B. */
export const bothHeads = () => runs[0].rows.map((a) => ({ a, b: sameHead(a, 1) })).filter(({ b }) => b);

/** The metrics that both looks have. */
export const bothColumns = () => runs[0].columns.filter(({ key }) => runs[1].column.has(key));

/** Returns true if a metric grows with the number of tokens, whatever a head does. */
const growsWithLength = ({ key, unit }) => key === "entropy" || ((unit === "tokens" || unit === "logit") && !key.endsWith("_random"));

/** The metrics of both looks that can be compared: if A and B differ in length, only those that do not grow with it. */
export function rankedColumns() {
  const [a, b] = runs.map(({ read }) => read.map(({ tokens }) => tokens.length).join());
  return a === b ? bothColumns() : bothColumns().filter((column) => !growsWithLength(column));
}

/** B's value minus A's; null if one is missing. */
export const changeOf = ({ a, b }, key) => (typeof a[key] === "number" && typeof b[key] === "number" ? b[key] - a[key] : null);

/** The unit for changes of a metric: 1 for a fraction, otherwise the metric's range over all heads of both looks. */
export function spanOf({ key, unit }) {
  if (unit === "share") return 1;
  const values = runs.flatMap(({ rows }) => known(rows, key));
  return Math.max(...values) - Math.min(...values) || 1;
}

/** The labels that each head lost or gained or, if there are none, its largest change: `{ a, b, column, label, verb, size }`. */
export function headChanges() {
  const columns = rankedColumns().map((column) => ({ column, span: spanOf(column) }));
  const sized = (pair, { column, span }) => Math.abs(changeOf(pair, column.key) ?? 0) / span;
  const found = bothHeads().flatMap((pair) => {
    const { a, b } = pair;
    const moved = (from, to, verb) => from.labels.filter(({ label }) => !hasLabel(to, label)).flatMap(({ label, key }) => {
      const measure = columns.find(({ column }) => column.key === key);
      return measure ? [{ ...pair, column: measure.column, label, verb, size: sized(pair, measure) }] : [];
    });
    const labels = [...moved(a, b, "lost"), ...moved(b, a, "gained")];
    if (labels.length) return labels;
    const most = columns.reduce((best, one) => (sized(pair, one) > sized(pair, best) ? one : best), columns[0]);
    return most && sized(pair, most) ? [{ ...pair, column: most.column, size: sized(pair, most) }] : [];
  });
  return found.sort((x, y) => Number(Boolean(y.label)) - Number(Boolean(x.label)) || y.size - x.size);
}

/** A change in words: `lost induction: … 0.83 → 0.62` or, if both values round to the same, `entropy fell by 0.00048 nats`. */
export function changeWords({ a, b, column, label, verb }) {
  const change = b[column.key] - a[column.key], [before, after] = [a, b].map((row) => figure(row[column.key], column));
  const alike = before === after && change !== 0;
  const numbers = [el("b", {}, alike ? signed(Math.abs(change), column).slice(1) : `${before} → ${after}`), unitName(column)];
  const name = column.title[0].toLowerCase() + column.title.slice(1);
  const moved = `${name} ${change > 0 ? "rose" : "fell"}`;
  if (label) return [`${verb} `, glyph(label), el("b", {}, label), alike ? `: ${moved} by ` : `: ${name} `, ...numbers];
  return [moved, alike ? " by " : ", ", ...numbers];
}

/** For each layer that both have: its index in A, its heads, and the mean change of each metric over them (NaN if unknown). */
export function layerChanges(columns) {
  const groups = new Map();
  for (const pair of bothHeads()) groups.set(pair.a.layer, [...(groups.get(pair.a.layer) ?? []), pair]);
  return [...groups].map(([layer, heads]) => ({
    layer, heads,
    means: columns.map(({ key }) => {
      const there = heads.map((pair) => changeOf(pair, key)).filter((change) => change !== null);
      return there.length ? there.reduce((sum, change) => sum + change, 0) / there.length : NaN;
    }),
  }));
}
