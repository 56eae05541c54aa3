// Alarm marks of both charts, and legend entries.

import { el } from "../shared/dom.js";
import { drawn } from "../shared/draw.js";
import { state } from "./run.js";
import { written } from "./scale.js";

/** Triangles, as one path per kind; those for alarms of statistics that are not shown are small and hollow. */
export function alarmPaths(points) {
  const marks = (kind, some, size) => (some.length === 0 ? [] : [drawn("path", {
    class: kind, d: some.map(({ at: [x, y] }) => `M${x.toFixed(1)} ${(y - size).toFixed(1)}l${size} ${1.75 * size}h${-2 * size}z`).join(""),
  })]);
  const own = ({ alarm }) => alarm.statistic === state.statistic;
  return [...marks("alarm other", points.filter((point) => !own(point)), 3.6), ...marks("alarm", points.filter(own), 5.5)];
}

/** The description of an alarm. */
export const alarmText = ({ statistic, value, rule }) => `${statistic} is ${written(value)} (${rule})`;

/** A symbol for a legend. */
export const symbol = (kind, d) => drawn("svg", { viewBox: "0 0 12 12", class: "chart", "aria-hidden": "true" }, drawn("path", { class: kind, d }));
export const TRIANGLE = "M6 1l4.6 8h-9.2z";

/** An entry of a legend: a symbol and its name. */
export const entry = (mark, ...text) => el("li", {}, mark, ...text);
