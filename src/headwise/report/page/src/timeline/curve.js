// The chosen head over the steps: its figures, their standard errors, the middle half of all heads.

import { $, el } from "../shared/dom.js";
import { drawn } from "../shared/draw.js";
import { hideTip, showTip } from "../shared/tip.js";
import { cellTip } from "./heat.js";
import { alarmPaths, entry, line, stepAxis, symbol, words } from "./marks.js";
import { DIFFERENCE, chosenColumn, heads, nearest, reach, runs, shown, state, statisticOf } from "./run.js";
import { scaleOf, scaler, tickText, ticks } from "./scale.js";





const curve = { left: 52, top: 8, bottom: 40, right: 10, high: 190 };

/** The figures of the chosen head in a run, column by column. */
function figuresOf(run, kind = "values") {
  const values = run[kind].get(state.statistic);
  return values && values.subarray(state.head * run.columns.length, (state.head + 1) * run.columns.length);
}

const shownRuns = () => (state.run === DIFFERENCE ? runs : [runs[state.run]]);
const runLetter = (run) => "ab"[runs.indexOf(run)];

/** The range of the figures that are drawn, and whether on a scale of logarithms: not with any below zero. */
function curveRange() {
  const found = shownRuns().flatMap((run) => {
    const errors = figuresOf(run, "errors");
    const values = [...figuresOf(run)];
    return [...values, ...values.map((value, place) => value + (errors?.[place] || 0)), ...run.crowd[state.statistic].flat()];
  }).filter((value) => value !== null && Number.isFinite(value));
  let [low, high] = found.length ? [Math.min(...found), Math.max(...found)] : [0, 1];
  if (scaleOf(statisticOf()) === "log" && low >= 0 && high > 0) {
    const least = Math.min(...found.filter((value) => value > 0));
    return { range: [Math.max(least, high * 1e-6) / 1.2, high * 1.2], log: true };
  }
  if (low >= 0 && low < 0.6 * high) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return { range: [low === 0 ? 0 : low - room, high + room], log: false };
}

/** A path through points, broken where one has no place. */
function path(points) {
  let text = "";
  points.forEach(([x, y], place) => {
    if (!Number.isFinite(y)) return;
    text += `${place && Number.isFinite(points[place - 1][1]) ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  });
  return text;
}

/** Areas between two lines, broken where one has no place. */
function area(xs, lower, upper) {
  let [text, start] = ["", -1];
  for (let place = 0; place <= xs.length; place++) {
    const there = place < xs.length && Number.isFinite(lower[place]) && Number.isFinite(upper[place]);
    if (there && start < 0) start = place;
    if (there || start < 0) continue;
    const part = (ys, order) => order.map((each) => `${xs[each].toFixed(1)} ${ys[each].toFixed(1)}`).join("L");
    const order = Array.from({ length: place - start }, (_, each) => start + each);
    text += `M${part(upper, order)}L${part(lower, order.toReversed())}Z`;
    start = -1;
  }
  return text;
}

export function drawCurve() {
  const [box, statistic] = [$("curve"), statisticOf()];
  const wide = box.clientWidth - curve.left - curve.right;
  const { range, log } = curveRange();
  const share = scaler(...range, log);
  Object.assign(curve, {
    wide, axis: reach(), x: (step) => curve.left + ((step - curve.axis[0]) / (curve.axis[1] - curve.axis[0] || 1)) * wide,
    y: (value) => (value === null || !Number.isFinite(value) ? NaN : curve.top + (1 - Math.max(0, share(value))) * curve.high),
  });
  const svg = drawn("svg", { height: curve.top + curve.high + curve.bottom, role: "presentation" });
  for (const value of ticks(...range, 5, log)) {
    svg.append(line(curve.left, curve.y(value), curve.left + wide, curve.y(value), "grid"), words(curve.left - 6, curve.y(value) + 4, "end", tickText(value)));
  }
  svg.append(...stepAxis(curve.left, curve.top + curve.high, wide, curve.axis));
  for (const run of shownRuns()) svg.append(...crowdOf(run));
  for (const run of shownRuns()) svg.append(...lineOf(run));
  const marks = shownRuns().flatMap((run) => run.alarms.filter(({ head }) => head === state.head).map((alarm) => alarmPoint(run, alarm)));
  svg.append(...alarmPaths(marks), drawn("g", { id: "curve-choice" }));
  box.replaceChildren(svg);
  drawCurveChoice();
  $("curve-what").replaceChildren(el("b", {}, `${statistic.title} `), log ? "on a scale of logarithms" : "over the steps");
  drawCurveLegend();
}

/**
 * The quartiles and the median of all heads.
 * @param {Run} run
 */
function crowdOf(run) {
  const [low, middle, high] = run.crowd[state.statistic].map((all) => all.map(curve.y));
  const xs = run.columns.map((column) => curve.x(column.middle));
  return [drawn("path", { class: "crowd", d: area(xs, low, high) }), drawn("path", { class: runs.length > 1 ? `median ${runLetter(run)}` : "median", d: path(xs.map((x, place) => [x, middle[place]])) })];
}

/**
 * The head's own line, with a band of one standard error; crosses where figures are not finite.
 * @param {Run} run
 */
function lineOf(run) {
  const [values, errors, kind] = [figuresOf(run), figuresOf(run, "errors"), runLetter(run)];
  const xs = run.columns.map((column) => curve.x(column.middle));
  const points = xs.map((x, place) => [x, curve.y(values[place])]);
  const parts = [];
  if (errors) {
    const side = (sign) => xs.map((_, place) => curve.y(values[place] + sign * errors[place]));
    parts.push(drawn("path", { class: `${kind} band`, d: area(xs, side(-1), side(1)) }));
  }
  parts.push(drawn("path", { class: kind, d: path(points), "data-run": kind }));
  if (xs.length <= 60) parts.push(drawn("path", { class: `${kind} dots`, d: points.filter(([, y]) => Number.isFinite(y)).map(([x, y]) => `M${x.toFixed(1)} ${y.toFixed(1)}h0`).join("") }));
  const lost = xs.filter((_, place) => values[place] === Infinity);
  if (lost.length) parts.push(drawn("path", { class: "lost", d: lost.map((x) => `M${x - 4} ${curve.top}l8 8m0 -8l-8 8`).join("") }));
  return parts;
}

/**
 * Where an alarm stands: at the figure that broke the rule, where this is the statistic.
 * @param {Run} run
 * @param {Alarm} alarm
 */
function alarmPoint(run, alarm) {
  const value = alarm.statistic === state.statistic && alarm.value !== null ? alarm.value : figuresOf(run)[nearest(run.columns, alarm.step)];
  const y = curve.y(value);
  return { alarm, at: [curve.x(alarm.step), Number.isFinite(y) ? Math.max(curve.top, y) : curve.top + 4] };
}

function drawCurveLegend() {
  const stroke = (kind) => symbol(kind, "M0 6h12");
  const sampled = shownRuns().some((run) => run.errors.has(state.statistic));
  $("curve-legend").replaceChildren(...[
    ...shownRuns().map((run) => entry(stroke(runLetter(run)), runs.length > 1 ? `${runLetter(run).toUpperCase()}, this head` : "this head")),
    sampled && entry(symbol(`${runLetter(shownRuns()[0])} band`, "M0 2h12v8h-12z"), "± standard error"),
    heads.length > 1 && entry(stroke("median"), "median of all heads"),
    heads.length > 1 && entry(symbol("crowd", "M0 2h12v8h-12z"), "middle half of them"),
  ].filter(Boolean));
}

/** The line at the chosen step. */
function drawCurveChoice() {
  const { columns } = shown();
  const x = curve.x(columns[chosenColumn(columns)].middle);
  $("curve-choice").replaceChildren(line(x, curve.top, x, curve.top + curve.high, "now"));
}

/** Connects the curve; `choose` is called with a head and a column. */
export function connectCurve(choose) {
  const column = (event) => {
    const x = event.clientX - $("curve").getBoundingClientRect().left - curve.left;
    if (x < 0 || x > curve.wide) return -1;
    return nearest(shown().columns, curve.axis[0] + (x / curve.wide) * (curve.axis[1] - curve.axis[0]));
  };
  $("curve").addEventListener("pointermove", (event) => {
    const at = column(event);
    if (at >= 0) showTip(event, cellTip(state.head, at)); else hideTip();
  });
  $("curve").addEventListener("pointerleave", hideTip);
  $("curve").addEventListener("click", (event) => {
    const at = column(event);
    if (at >= 0) choose(state.head, at);
  });
}
