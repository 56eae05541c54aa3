// What both charts draw with: axes, marks.

import { el } from "../shared/dom.js";
import { drawn } from "../shared/draw.js";
import { state } from "./run.js";
import { tickText, ticks, written } from "./scale.js";





export const line = (x1, y1, x2, y2, kind) => drawn("line", { x1, y1, x2, y2, class: kind });
export const words = (x, y, anchor, text) => drawn("text", { x, y, "text-anchor": anchor }, text);

/** The axis of steps below a chart: a tick wherever there is room for its number. */
export function stepAxis(left, top, wide, [low, high]) {
  const found = ticks(Math.max(low, 0), high, Math.max(2, Math.min(10, Math.floor(wide / 75))));
  const at = (step) => left + ((step - low) / (high - low || 1)) * wide;
  const inside = found.filter((step) => Number.isInteger(step) && at(step) <= left + wide + 1);
  return [
    ...inside.flatMap((step) => [line(at(step), top, at(step), top + 4, "grid"), words(at(step), top + 17, "middle", tickText(step))]),
    words(left + wide / 2, top + 33, "middle", "step"),
  ];
}

/** Triangles as one path a kind; alarms of other statistics than the one shown are small and hollow. */
export function alarmPaths(points) {
  const marks = (kind, some, size) => (some.length === 0 ? [] : [drawn("path", {
    class: kind, d: some.map(({ at: [x, y] }) => `M${x.toFixed(1)} ${(y - size).toFixed(1)}l${size} ${1.75 * size}h${-2 * size}z`).join(""),
  })]);
  const own = ({ alarm }) => alarm.statistic === state.statistic;
  return [...marks("alarm other", points.filter((point) => !own(point)), 3.6), ...marks("alarm", points.filter(own), 5.5)];
}

/** What a tip and a listener say of an alarm. */
export const alarmText = ({ statistic, value, rule }) => `${statistic} is ${written(value)} (${rule})`;

/** The symbol of a legend. */
export const symbol = (kind, d) => drawn("svg", { viewBox: "0 0 12 12", class: "chart", "aria-hidden": "true" }, drawn("path", { class: kind, d }));
export const TRIANGLE = "M6 1l4.6 8h-9.2z";

/** An entry of a legend: a symbol and its name. */
export const entry = (mark, ...text) => el("li", {}, mark, ...text);
