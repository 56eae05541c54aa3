// A head's attention map: its color scale, ticks and tooltip.

import { $ } from "../shared/dom.js";
import { VIRIDIS } from "../shared/draw.js";
import { hideTip, showTip } from "../shared/tip.js";
import { headName, percent, shortened, weight } from "../shared/words.js";
import { allLabels } from "./look.js";
import { picture } from "./save.js";
import { state } from "./state.js";
import { cellLabel, cellPlace, tokenName } from "./words.js";

export const shade = (value) => (state.scale === "linear" ? value : Math.sqrt(value));

/** The weight that is drawn in full color: 1, or the largest of a row. */
export const fullColor = (weights) => (state.scale === "row" ? Math.max(...weights, 1e-9) : 1);

/** Describes the color scale; `top` is the weight in full color. */
export function scaleWords(top) {
  const full = state.scale === "row" ? `the largest weight here, ${weight(top)}` : "a weight of 1";
  return `Full color is ${full}${state.scale === "linear" ? "" : "; colors follow the square root"}.`;
}

export const SCALES = [
  ["root", "√ weight", "Colors by the square root of the weight, the same for every head"],
  ["linear", "weight", "Colors by the weight, the same for every head"],
  ["row", "row maximum", "Colors relative to the largest weight of each row, so that heads with spread-out attention are visible"],
];

/** Returns true if the layer is causal and all keys of a cell come after all its queries. */
export const ahead = (layer, i, j) => layer.causal && layer.cols.start(j) >= layer.rows.start(i + 1);

/**
 * The map as rows of numbers; null where the mask hides the key.
 * @param {Layer} layer
 * @param {Float32Array} map
 * @param {(value: number) => number} [write]
 */
export function mapRows(layer, map, write) {
  const [n, m] = [layer.rows.cells, layer.cols.cells];
  return Array.from({ length: n }, (_, i) => {
    const line = map.subarray(i * m, (i + 1) * m);
    const top = fullColor(line);
    const one = write ?? ((value) => shade(value / top));
    return Array.from({ length: m }, (_, j) => (ahead(layer, i, j) ? null : one(line[j])));
  });
}

/** As many ticks as are readable in `room` pixels over the visible range, each with at most `most` characters. */
function tokenTicks(stream, axis, range, room, most) {
  const [low, high] = [Math.max(0, Math.ceil(Math.min(...range))), Math.min(axis.cells - 1, Math.floor(Math.max(...range)))];
  const step = Math.max(1, Math.ceil((high - low + 1) / Math.max(3, room / 15)));
  const cells = [];
  for (let cell = Math.ceil(low / step) * step; cell <= high; cell += step) cells.push(cell);
  return cells.map((cell) => [cell, shortened(tokenName(stream, axis.start(cell)), most)]);
}

export const wholeRanges = (layer) => ({ xaxis: [-0.5, layer.cols.cells - 0.5], yaxis: [layer.rows.cells - 0.5, -0.5] });

/** The ticks of a map's color bar. */
function weightMarks() {
  if (state.scale === "row") return [0, 0.1, 0.5, 1].map((share) => [shade(share), percent(share)]);
  return (state.scale === "linear" ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1]).map((mark) => [shade(mark), String(mark)]);
}

/**
 * Draws a head's map in the element `id`. A `small` map has no color bar, and ticks only with `ticks`;
 * `grid` replaces the weights and colors; other options are passed to the chart.
 * @param {string} id
 * @param {Row} row
 * @param {Layer} layer
 * @param {Float32Array} map
 * @param {Partial<ChartSpec> & { small?: boolean, ticks?: boolean }} options
 * @param {string} run
 */
export function drawMap(id, row, layer, map, { small = false, ticks = !small, grid, ...rest }, run = "") {
  const width = Math.min($(id).clientWidth, small ? 340 : Infinity);
  const narrow = width < 420;
  const room = small ? (ticks ? { l: 64, r: 4, b: 62 } : { l: 18, r: 4, b: 20 }) : narrow ? { l: 72, r: 40, b: 74 } : { l: 84, r: 48, b: 92 };
  const margin = { ...room, t: small ? 4 : 8 };
  const drawnWide = width - margin.l - margin.r;
  const ranges = (!small && state.ranges) || wholeRanges(layer);
  const axis = (range, stream, cells, title) => ({
    range, title: small ? title.split(":")[0] : title, mono: true,
    ...(ticks ? { ticks: tokenTicks(stream, cells, range, drawnWide, small ? 5 : narrow ? 6 : 10) } : {}),
  });
  const tall = Math.max(0.5, Math.min(small ? 1 : 1.4, layer.rows.count / layer.cols.count));
  return picture(id, {
    width, height: Math.round(drawnWide * tall) + margin.t + margin.b, margin,
    x: { ...axis(ranges.xaxis, layer.to, layer.cols, "key"), turned: 60 },
    y: axis(ranges.yaxis, layer.from, layer.rows, "query"),
    grid: grid ?? { z: mapRows(layer, map), low: 0, high: 1, stops: VIRIDIS }, ramp: small ? undefined : weightMarks(),
    says: {
      title: `${run && `${run}: `}${headName(row)}, ${allLabels(row)}`, marks: weightMarks(), random: layer.isTwin,
      scale: `Weight of each query (down) on each key (across); ${state.scale === "row" ? "full color is the largest weight of a row" : "full color is a weight of 1"}.`,
    }, ...rest,
  });
}

/** Shows a tooltip that describes a cell. */
export function mapTip(event, { column, row: line }, layer, map) {
  if (column < 0 || line < 0 || column >= layer.cols.cells || line >= layer.rows.cells) return hideTip();
  return showTip(event, [
    ["query", cellLabel(layer.from, layer.rows, line), `at ${cellPlace(layer.rows, line)}`],
    ["key", cellLabel(layer.to, layer.cols, column), `at ${cellPlace(layer.cols, column)}`],
    ["weight", null, weight(map[line * layer.cols.cells + column])],
  ]);
}

