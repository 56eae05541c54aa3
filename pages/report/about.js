// The About view: how the page was made, the rules for labels, and the formulas of the metrics.

import { $, el } from "../shared/dom.js";
import { subscripts } from "../shared/words.js";
import { evaluated, ofClass } from "./heads.js";
import { NONE, data, runs } from "./look.js";
import { formula } from "./words.js";

export const aboutView = { title: "About", more: true, draw: drawAbout };

function drawAbout() {
  const tried = data.rules.filter((rule) => evaluated(rule) && !ofClass(rule));  // the others do not apply to this model
  const limit = (key, sign, threshold) => `${(data.column.get(key)?.title ?? key).toLowerCase()} ${sign} ${threshold}`;
  const conditions = (/** @type {Rule} */ { key, sign, threshold, given }) => limit(key, sign, threshold) + (given ? `, and ${limit(...given)}` : "");
  $("rules").replaceChildren(...tried.map((rule) => el("li", {}, el("b", {}, rule.label), el("span", {}, conditions(rule), el("br"),
    el("small", {}, [rule.why, rule.source].filter(Boolean).join(" · "))))),
  el("li", {}, el("b", {}, NONE), el("span", {}, "otherwise")));
  $("formulas").replaceChildren(...data.columns.map((column) => el("div", {}, el("dt", {}, column.title),
    el("dd", {}, formula(column.formula)), el("dd", {}, column.meaning))));
  const lines = (made) => made.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, ...subscripts(value))]);
  $("made").replaceChildren(...lines(runs[0].made));
  if (runs.length === 1) return;
  const before = new Set(runs[0].made.map(String));
  const other = runs[1].made.filter((line) => !before.has(String(line)));
  $("made").prepend(el("dt", {}, el("b", {}, "A")), el("dd", {}));
  $("made").append(el("dt", {}, el("b", {}, "B")), el("dd", {}, other.length ? "same as A, except:" : "same as A"), ...lines(other));
}
