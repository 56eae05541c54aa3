// Labels: each has its own color and glyph, the same on every page and in every picture.

import { $, dark, el } from "../shared/dom.js";
import { drawn } from "../shared/draw.js";
import { counted, headInWords, headName, percent, unitName } from "../shared/words.js";
import { NONE, allLabels, data, firstLabel } from "./look.js";
import { figure } from "./words.js";

const styles = JSON.parse($("styles").textContent);
const noStyle = styles.find(({ label }) => label === NONE);
const named = styles.filter((style) => style !== noStyle);

/** The style of a label; an unknown label gets the style with its index in the look's list of labels. */
export function styleOf(name) {
  return styles.find(({ label }) => label === name) ?? named[Math.max(0, data.labels.indexOf(name)) % named.length];
}

export const labelColor = (name) => styleOf(name)[dark.matches ? "dark" : "light"];

const CIRCLE = "M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0 -9z";

/** The glyph of a point: a circle for a head without a label. */
export const pointGlyph = (name) => (name === NONE ? CIRCLE : styleOf(name).glyph);

/** A label's glyph in its color. */
export function glyph(name, path = styleOf(name).glyph) {
  const mark = drawn("svg", { viewBox: "0 0 12 12", class: "glyph", "aria-hidden": "true" });
  mark.append(drawn("path", { d: path, fill: labelColor(name), "fill-rule": "evenodd" }));
  return mark;
}

/**
 * A line for each label of a head: what such a head does, and the metric that the label is based on.
 * @param {Row} row
 */
export function labelLines(row) {
  if (!row.labels.length) {
    const uneven = data.rules.find(({ given }) => given?.[0] === "entropy_gap")?.given[2];
    const gap = row.entropy_gap;
    const uniform = typeof gap === "number" && gap < uneven ? `; on average, entropy is ${figure(gap, data.column.get("entropy_gap"))} nats below that of uniform attention` : "";
    return [el("li", {}, el("b", {}, NONE), `: no rule holds${uniform}`)];
  }
  return row.labels.map(({ label, key, score, threshold, coverage, sign = "≥" }) => {
    const column = data.column.get(key);
    const rule = data.rules.find((one) => one.label === label && one.key === key) ?? data.rules.find((one) => one.label === label);
    const limit = `the label requires ${figure(threshold, column)} or ${sign === "≤" ? "less" : "more"}`;
    const share = typeof coverage === "number" && coverage < 0.995 ? ` over the ${percent(coverage)} of queries that have such a key` : "";
    return el("li", {}, glyph(label), el("b", {}, label), rule?.why ? `: ${rule.why}. ` : ": ",
      el("small", {}, `${column?.title ?? key}: ${figure(score, column)}${share}${overRows(key)}; ${limit}.`));
  });
}

/** A phrase with the number of random rows or texts that a metric is averaged over; empty for one text. */
export function overRows(key) {
  const { random_rows: rows, random_period: period, texts } = data.provenance;
  if (key.endsWith("_random")) return rows ? `, a mean over ${counted(rows, "row")} of ${period} repeated random tokens` : "";
  return texts > 1 ? `, a mean over ${counted(texts, "text")}` : "";
}

/** A head's label, in its short form if a cell `across` pixels wide is too narrow. */
export function brief(row, across) {
  const name = firstLabel(row);
  if (name === NONE) return "–";
  return across < 8 * name.length + 24 ? data.rules.find((rule) => rule.label === name)?.brief ?? name : name;
}

/** A metric's short name, marked if it is measured on repeated random tokens. */
export const briefTitle = ({ key, short }) => (key.endsWith("_random") ? `${short} (repeated)` : short);

/** A button with the name of a head, such as `L5H3`. */
export function headButton(row, act, kind = "plain") {
  const button = el("button", { type: "button", class: kind, "aria-label": `${headName(row)}: ${headInWords(row)}` }, headName(row));
  if (act) button.addEventListener("click", act);
  return button;
}

/**
 * The tooltip lines for a head.
 * @param {Row} row
 * @param {Column} [column]
 */
export function headTip(row, column) {
  const lines = [[headName(row), null, row.of.reads], ["Label", null, allLabels(row)]];
  if (column) lines.push([column.title, null, figure(row[column.key], column) + unitName(column)]);
  const coverage = column && row[`${column.key}_coverage`];
  if (typeof coverage === "number" && coverage < 0.995) lines.push(["Coverage", null, percent(coverage)]);
  return lines;
}
