// The heat map of heads by steps: a canvas with axes, alarms and the current choice drawn over it.

import { chart, reframe } from "../shared/chart.js";
import { $, css, el } from "../shared/dom.js";
import { VIRIDIS, drawn } from "../shared/draw.js";
import { hideTip, showTip } from "../shared/tip.js";
import { counted, headName } from "../shared/words.js";
import { TRIANGLE, alarmPaths, alarmText, entry, symbol } from "./marks.js";
import { DIFFERENCE, changes, chosenColumn, columnAt, data, heads, isShare, reach, runs, shown, shownAlarms, shownHeads, state, statisticOf } from "./run.js";
import { bounds, scaleOf, scaler, shownText, signedScaler, signedText, stepText, stepTicks, unitText, written } from "./scale.js";

/** The values that the colors show, or their change since the first step. */
function colored() {
  const found = shown();
  return state.scale === "change" && state.run !== DIFFERENCE ? { ...found, values: changes(found) } : found;
}

/** The color scale: `{ share, stops, low, high, log }`. */
function coloring(statistic) {
  if (state.scale === "change" && state.run !== DIFFERENCE) return signedColors(colored().values, false);
  if (state.run === DIFFERENCE) return signedColors(shown(statistic.key).values, scaleOf(statistic) === "log");
  const { low, high, least } = bounds(statistic);
  if (low < 0 && high > 0) return signedColors(runs.flatMap((run) => [...run.values.get(statistic.key)]), scaleOf(statistic) === "log");
  if (scaleOf(statistic) === "log") {
    const start = Math.max(least, high * 1e-6);
    return { low: start, high, log: true, share: scaler(start, high, true), stops: VIRIDIS };
  }
  if (low > high) return { low: 0, high: 1, log: false, share: scaler(0, 1, false), stops: VIRIDIS };  // no value is finite
  const [from, to] = isShare(statistic) ? [0, Math.max(1, high)] : [statistic.unit === "logit" ? low : Math.min(0, low), high];
  return { low: from, high: to, log: false, share: scaler(from, to, false), stops: VIRIDIS };
}

/** A color scale with two sides around zero. */
function signedColors(values, log) {
  const sizes = Float32Array.from(values, Math.abs).filter((size) => size > 0 && size < Infinity).sort();
  const [end, one] = [sizes.at(-1) ?? 1, sizes[sizes.length >> 1] ?? 1];
  return { low: -end, high: end, log, share: signedScaler(end, one, log), stops: [css("--low"), css("--panel"), css("--high")] };
}

/**
 * The columns under each pixel, from left to right: `[first, end]`, or null if there are none.
 * @param {Steps[]} columns
 * @param {number} wide
 * @param {number[]} reach
 */
function columnsUnder(columns, wide, [low, high]) {
  const each = (high - low) / wide;
  const middles = columns.map(({ middle }) => (middle < low || middle > high ? -1 : Math.min(wide - 1, Math.floor((middle - low) / each))));
  const found = Array.from({ length: wide }, () => null);
  columns.forEach(({ from, to }, place) => {
    const end = Math.min(wide, Math.ceil((to - low) / each - 0.5));
    for (let x = Math.max(0, Math.ceil((from - low) / each - 0.5)); x < end; x++) found[x] = [place, place + 1];
  });
  middles.forEach((x, place) => {
    if (x < 0) return;
    const [from, to] = found[x] ?? [place, place];
    found[x] = middles[from] === x ? [Math.min(from, place), Math.max(to, place + 1)] : [place, place + 1];
  });
  return found;
}

/** One value for several columns of a head: their mean or, with `largest`, their maximum. */
function together(values, from, to, largest) {
  let [found, count] = [largest ? -Infinity : 0, 0];
  for (let place = from; place < to; place++) {
    const value = values[place];
    if (Number.isNaN(value)) continue;
    count++;
    if (!largest) found += value;
    else if (value > found) found = value;
  }
  return count === 0 ? NaN : largest ? found : found / count;
}

/** The cells of the heat map, one per head and pixel, as fractions of the scale. Up to `most` columns share a pixel. */
function cellsOf(statistic, share, wide) {
  const { columns, values } = colored();
  const under = columnsUnder(columns, wide, reach());
  const largest = statistic.kind === "maximum" && state.run !== DIFFERENCE;
  const z = shownHeads().map((head) => {
    const start = head * columns.length;
    return Float32Array.from(under, (some) => {
      if (some === null) return NaN;
      const value = some[1] - some[0] === 1 ? values[start + some[0]] : together(values, start + some[0], start + some[1], largest);
      return value === Infinity ? Infinity : share(value);
    });
  });
  return { z, most: Math.max(...under.map((some) => (some ? some[1] - some[0] : 0))) };
}

/** Draws the heat map; `choose` is called with a head and a column, `zoom` with a range of steps. */
export function drawHeat(choose, zoom) {
  const statistic = statisticOf();
  const order = shownHeads();
  const width = $("heat").clientWidth;
  const margin = { l: 46, r: 10, t: 6, b: 40 };
  const wide = width - margin.l - margin.r;
  const tall = Math.max(1, Math.min(26, Math.round(430 / order.length)));
  const color = coloring(statistic);
  const { z, most } = cellsOf(statistic, color.share, Math.max(1, Math.round(wide * devicePixelRatio)));
  const at = ({ x, row }) => ({ head: order[row], column: columnAt(shown().columns, x) });
  chart("heat", {
    width, height: tall * order.length + margin.t + margin.b, margin, across: true, zoom,
    x: { range: reach(), title: "step", ticks: stepTicks(reach(), wide) },
    y: { range: [order.length - 0.5, -0.5], title: tall < 12 && state.sort === "layer" ? "layer" : "", ticks: headTicks(order, tall) },
    grid: { z, low: 0, high: 1, stops: color.stops, lost: css("--bad"), across: reach(), down: [-0.5, order.length - 0.5] },
    frames: choiceFrames(order, tall), over: heatAlarms,
    hover: (event, place) => {
      const { head, column } = at(place);
      if (column >= 0) showTip(event, cellTip(head, column)); else hideTip();
    },
    click: (place) => {
      const { head, column } = at(place);
      if (column >= 0) choose(head, column);
    },
  }).setAttribute("aria-label", `${statistic.title} of ${counted(order.length, "head")} over steps; the table of values shows the selected head`);
  $("pooled").textContent = most > 1 ? `Up to ${most} columns share a pixel, which shows ${statistic.kind === "maximum" && state.run !== DIFFERENCE ? "their maximum" : "their mean"}.` : "";
  drawRamp(color);
}

/** Ticks with the names of heads, or of layers if the rows are too thin for one name each. */
function headTicks(order, tall) {
  if (tall >= 12) return order.map((head, row) => [row, headName(heads[head])]);
  if (state.sort !== "layer") return [];
  const ticks = [];
  let [first, shownAt] = [0, -Infinity];
  for (const [layer, [, count]] of data.layers.entries()) {
    if (state.layer >= 0 && layer !== state.layer) continue;
    const middle = first + (count - 1) / 2;
    if ((middle - shownAt) * tall >= 13) ticks.push([shownAt = middle, String(layer)]);
    first += count;
  }
  return ticks;
}

/** @param {ChartSpec} spec */
function heatAlarms({ toX, toY }) {
  const rows = new Map(shownHeads().map((head, row) => [head, row]));
  const [low, high] = reach();
  const points = shownAlarms().filter(({ head, step }) => rows.has(head) && step >= low && step <= high)
    .map((alarm) => ({ alarm, at: [toX(alarm.step), toY(rows.get(alarm.head))] }));
  return [drawn("g", { id: "heat-marks" }, ...alarmPaths(points))];
}

/**
 * The frame around the chosen head, and the line at the chosen step.
 * @returns {Frame[]}
 */
function choiceFrames(order, tall) {
  const { columns } = shown();
  const x = columns[chosenColumn(columns)].middle;
  const [[left, right], half] = [reach(), Math.max(0.5, 2 / tall)];
  /** @type {Frame[]} */
  const frames = [{ x0: x, x1: x, y0: -0.5, y1: order.length - 0.5, plain: true, width: 1.5 }];
  const row = order.indexOf(state.head);
  if (row >= 0) frames.push({ x0: left, x1: right, y0: row - half, y1: row + half, width: 2 });
  return frames;
}

/** Draws the current choice over the existing heat map. */
export function drawChoice() {
  const order = shownHeads();
  reframe("heat", choiceFrames(order, $("heat").chart.area.height / order.length));
}

/** Draws the legend of the heat map's colors and marks. */
function drawRamp({ low, high, log, stops }) {
  const ramp = el("i", { class: "ramp" });
  ramp.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const swatch = (name) => {
    const mark = el("i", { class: "swatch" });
    mark.style.background = css(name);
    return mark;
  };
  const { values } = shown();
  const signed = state.run === DIFFERENCE || state.scale === "change";
  const text = signed ? signedText : written;
  const lowest = !signed && bounds(statisticOf()).low < low ? `≤ ${text(low)}` : text(low);
  const alarms = shownAlarms();
  const own = alarms.some(({ statistic }) => statistic === state.statistic);
  const other = alarms.some(({ statistic }) => statistic !== state.statistic);
  $("legend").replaceChildren(...[
    entry(el("span", {}, lowest), ramp, text(high), el("small", {}, log ? "\u00a0(logarithmic)" : state.scale === "change" && state.run !== DIFFERENCE ? "\u00a0(change since the first step)" : "")),
    values.some(Number.isNaN) && entry(swatch("--soft"), "no value"),
    values.some((value) => value === Infinity) && entry(swatch("--bad"), "not finite"),
    own && entry(symbol("alarm", TRIANGLE), "alarm"),
    other && entry(symbol("alarm other", TRIANGLE), "alarm of another statistic"),
  ].filter(Boolean));
}

/** The tooltip lines for a head at a column. */
export function cellTip(head, column) {
  const [{ columns, values }, statistic] = [shown(), statisticOf()];
  const { first, last } = columns[column];
  const lines = [[headName(heads[head]), null, ""], [stepText(columns[column]), null, ""]];
  lines.push([statistic.title, null, shownText(values[head * columns.length + column]) + unitText(statistic)]);
  const alarms = shownAlarms().filter((alarm) => alarm.head === head && alarm.step >= first && alarm.step <= last);
  return [...lines, ...alarms.map((alarm) => ["Alarm:", null, alarmText(alarm)])];
}

/** Connects the keys of both charts; `choose` is called with a head and a column. */
export function connectKeys(choose) {
  for (const id of ["heat", "curve"]) $(id).addEventListener("keydown", (event) => keyed(event, choose));
}

/** Moves to another head, layer or step. */
function keyed(event, choose) {
  const { columns } = shown();
  const [column, { layer }] = [chosenColumn(columns), heads[state.head]];
  const next = (where) => heads.findIndex((head) => head.layer === layer + where);
  const order = shownHeads();
  const beside = (by) => order[order.indexOf(state.head) + by] ?? -1;
  const [head, to] = {
    ArrowUp: [beside(-1), column], ArrowDown: [beside(1), column],
    ArrowLeft: [state.head, column - 1], ArrowRight: [state.head, column + 1],
    PageUp: [next(-1), column], PageDown: [next(1), column],
    Home: [state.head, 0], End: [state.head, columns.length - 1],
  }[event.key] ?? [];
  if (head === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  if (heads[head] && columns[to]) choose(head, to);
}
