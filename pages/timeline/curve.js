// The chosen head over the steps: its values and standard errors, and the interquartile range of all heads.

import { chart } from "../shared/chart.js";
import { $, el } from "../shared/dom.js";
import { drawn } from "../shared/draw.js";
import { showTip } from "../shared/tip.js";
import { cellTip } from "./heat.js";
import { alarmPaths, entry, symbol } from "./marks.js";
import { DIFFERENCE, chosenColumn, heads, nearest, reach, runs, shown, state, statisticOf } from "./run.js";
import { scaleOf, scaler, stepTicks, valueTicks } from "./scale.js";

/** The values of the chosen head in a run, column by column. */
function valuesOf(run, kind = "values") {
  const values = run[kind].get(state.statistic);
  return values && values.subarray(state.head * run.columns.length, (state.head + 1) * run.columns.length);
}

const shownRuns = () => (state.run === DIFFERENCE ? runs : [runs[state.run]]);
const runLetter = (run) => "ab"[runs.indexOf(run)];
const COLORS = { a: "--accent", b: "--mark" };
const HIGH = 190;  // height of the curve in pixels

/** The range of the values drawn, and whether the scale is logarithmic (never with values below zero). */
function curveRange() {
  const found = shownRuns().flatMap((run) => {
    const errors = valuesOf(run, "errors");
    const values = [...valuesOf(run)];
    return [...values, ...values.map((value, place) => value + (errors?.[place] || 0)), ...run.crowd[state.statistic].flat()];
  }).filter((value) => value !== null && Number.isFinite(value));
  let [low, high] = found.length ? [Math.min(...found), Math.max(...found)] : [0, 1];
  if (scaleOf(statisticOf()) === "log" && low >= 0 && high > 0) {
    const least = Math.min(...found.filter((value) => value > 0));
    return { range: [Math.max(least, high * 1e-6) / 1.2, high * 1.2], log: true };
  }
  if (low >= 0 && low < 0.6 * high && scaleOf(statisticOf()) !== "change") low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return { range: [low === 0 ? 0 : low - room, high + room], log: false };
}

const finite = (value) => (value === null || !Number.isFinite(value) ? NaN : value);

/** Draws the curve; `choose` is called with the head and a column. */
export function drawCurve(choose, zoom) {
  const statistic = statisticOf();
  const width = $("curve").clientWidth;
  const margin = { l: 52, r: 10, t: 8, b: 40 };
  const { range, log } = curveRange();
  const share = scaler(range[0], range[1], log);
  const shownOnes = shownRuns();
  chart("curve", {
    width, height: margin.t + HIGH + margin.b, margin, across: true, zoom,
    x: { range: reach(), title: "step", ticks: stepTicks(reach(), width - margin.l - margin.r) },
    y: { range, ticks: valueTicks(range[0], range[1], 5, log), lines: true, share: (value) => Math.max(0, share(value)) },
    areas: [...shownOnes.map(quartiles), ...shownOnes.flatMap(errorBand)],
    lines: [...shownOnes.map(medianLine), ...shownOnes.map(ownLine)],
    over: curveMarks, frames: stepFrames(range),
    hover: (event, { x }) => showTip(event, cellTip(state.head, nearest(shown().columns, x))),
    click: ({ x }) => choose(state.head, nearest(shown().columns, x)),
  });
  $("curve-what").replaceChildren(el("b", {}, `${statistic.title} `), log ? "on a logarithmic scale" : "over the steps");
  drawCurveLegend();
}

/** The interquartile range of all heads. */
function quartiles(/** @type {Run} */ run) {
  const [low, , high] = run.crowd[state.statistic];
  return { points: run.columns.map(({ middle }, place) => [middle, finite(low[place]), finite(high[place])]), color: "--muted", opacity: 0.24 };
}

function medianLine(/** @type {Run} */ run) {
  const median = run.crowd[state.statistic][1];
  return {
    points: run.columns.map(({ middle }, place) => [middle, finite(median[place])]), width: 1, dash: "2 3",
    color: runs.length > 1 ? COLORS[runLetter(run)] : "--muted",
  };
}

/** A band of one standard error around the head's own line, where errors are known. */
function errorBand(/** @type {Run} */ run) {
  const [values, errors] = [valuesOf(run), valuesOf(run, "errors")];
  if (!errors) return [];
  return [{
    points: run.columns.map(({ middle }, place) => [middle, values[place] - errors[place], values[place] + errors[place]]),
    color: COLORS[runLetter(run)], opacity: 0.25,
  }];
}

function ownLine(/** @type {Run} */ run) {
  const [values, letter] = [valuesOf(run), runLetter(run)];
  return {
    points: run.columns.map(({ middle }, place) => [middle, finite(values[place])]), color: COLORS[letter], width: 2,
    dots: run.columns.length <= 60, more: { class: letter, "data-run": letter, "stroke-linejoin": "round" },
  };
}

/**
 * Crosses where values are not finite, and the alarms of the head.
 * @param {ChartSpec} spec
 */
function curveMarks({ toX, toY, area }) {
  const lost = shownRuns().flatMap((run) => run.columns.filter((_, place) => valuesOf(run)[place] === Infinity)).map(({ middle }) => toX(middle));
  const cross = (x) => `M${x - 4} ${area.y}l8 8m0 -8l-8 8`;
  const [first, last] = reach();
  const alarms = shownRuns().flatMap((run) => run.alarms.filter(({ head, step }) => head === state.head && step >= first && step <= last).map((alarm) => {
    const own = alarm.statistic === state.statistic && alarm.value !== null;
    const y = toY(finite(own ? alarm.value : valuesOf(run)[nearest(run.columns, alarm.step)]));
    return { alarm, at: [toX(alarm.step), Number.isFinite(y) ? Math.max(area.y, y) : area.y + 4] };
  }));
  return [...(lost.length ? [drawn("path", { class: "lost", d: lost.map(cross).join("") })] : []), ...alarmPaths(alarms)];
}

function drawCurveLegend() {
  const stroke = (kind) => symbol(kind, "M0 6h12");
  const sampled = shownRuns().some((run) => run.errors.has(state.statistic));
  $("curve-legend").replaceChildren(...[
    ...shownRuns().map((run) => entry(stroke(runLetter(run)), runs.length > 1 ? `${runLetter(run).toUpperCase()}, this head` : "this head")),
    sampled && entry(symbol(`${runLetter(shownRuns()[0])} band`, "M0 2h12v8h-12z"), "± standard error"),
    heads.length > 1 && entry(stroke("median"), "median of all heads"),
    heads.length > 1 && entry(symbol("crowd", "M0 2h12v8h-12z"), "their interquartile range"),
  ].filter(Boolean));
}

/**
 * The line at the chosen step.
 * @param {number[]} range
 */
function stepFrames([y0, y1]) {
  const { columns } = shown();
  const x = columns[chosenColumn(columns)].middle;
  return [{ x0: x, x1: x, y0, y1, plain: true, width: 1.5 }];
}
