// The overview: every head on the left, the story of the chosen one beside it, and the heads most worth seeing.

import { cellColor, frame, paintCells, roundTicks } from "../shared/chart.js";
import { numbers } from "../shared/codec.js";
import { $, check, css, el, switches } from "../shared/dom.js";
import { VIRIDIS, drawn, hex, inkOn } from "../shared/draw.js";
import { counted, headName, whole } from "../shared/words.js";
import { drawCards } from "./cards.js";
import { choose, redraw, remember } from "./choice.js";
import { brief, briefTitle, glyph, labelColor, styleOf } from "./labels.js";
import { NONE, data, firstLabel, hasLabel, known } from "./look.js";
import { writeTile } from "./mosaic.js";
import { picture } from "./save.js";
import { chosen, rowAt, state } from "./state.js";
import { drawStory, peek } from "./story.js";
import { headRows } from "./weights.js";
import { figure } from "./words.js";

export const headsView = {
  title: "Overview",
  async load() {
    maps = posterSide() ? await Promise.all(data.layers.map((layer) => numbers(layer.maps))) : [];
    return headRows(chosen());
  },
  draw(rows) {
    drawStatistics();
    drawHeads();
    drawStory(chosen(), rows);
    drawCards();
  },
};

let maps = [];  // the maps of each layer, for the poster

/** Metrics that have their own button besides the menu: the first five of these that are available. */
const FAVOURITES = ["ablation", "importance", "entropy", "previous", "induction_random", "first", "max_logit", "same_token", "distance"];

function drawStatistics() {
  const random = ({ key }) => key.endsWith("_random");
  const option = ({ key, title }) => el("option", { value: key }, title);
  const group = (name, columns) => (columns.length ? [el("optgroup", { label: name }, ...columns.map(option))] : []);
  $("statistic-menu").replaceChildren(el("option", { value: "label" }, "Label"),
    ...group("on the text", data.columns.filter((column) => !random(column))), ...group("on repeated random tokens", data.columns.filter(random)));
  $("statistic-menu").value = state.statistic;
  const shown = FAVOURITES.flatMap((key) => data.column.get(key) ?? []).slice(0, 5);
  switches($("statistics"), "statistic", shown.map((column) => [column.key, briefTitle(column), column.title]), state.statistic, chooseStatistic);
}

function chooseStatistic(key) {
  state.statistic = key;
  remember();
  $("statistic-menu").value = key;
  check("statistic", key);
  drawHeads();
}

/** Blue below zero, orange above, the panel's own color at zero. */
export const diverging = () => ["--low", "--panel", "--high"].map(css);

/** The color scale of a metric and its ends: 0 to 1 for fractions, so that maps can be compared. */
function colors(column, values) {
  if (column.unit === "share") return { low: 0, high: 1, stops: VIRIDIS };
  const [low, high] = [Math.min(...values, Infinity), Math.max(...values, -Infinity)];
  if (low < 0 && high > 0) {
    const end = Math.max(-low, high);
    return { low: -end, high: end, stops: diverging() };
  }
  const least = column.unit === "logit" ? low : Math.min(0, low);
  return { low: least, high: Math.max(high, least + 1e-9), stops: VIRIDIS };
}

/** A grid of layers by heads with the values of `cell(row)`; null where a layer has no such head. */
export function headsGrid(cell, look = data) {
  const grid = look.layers.map(() => Array(look.width).fill(null));
  for (const row of look.rows) grid[row.layer][row.head] = cell(row) ?? null;
  return grid;
}

/** @returns {Cells} */
function headsCells() {
  const column = data.column.get(state.statistic);
  const out = (row) => state.only && !hasLabel(row, state.only);
  if (column) return { gap: 2, ...colors(column, known(data.rows, column.key)), z: headsGrid((row) => (out(row) ? null : row[column.key])) };
  const z = headsGrid((row) => (out(row) ? null : data.labels.indexOf(firstLabel(row))));
  return { gap: 2, z, fill: (index) => labelColor(data.labels[index]) };
}

const STRIP = 17;   // height in pixels of the top of a cell, which shows its label
const POSTER = " Queries down, keys across; lighter is more weight.";
const LEAST = 16;   // side in pixels of the smallest useful map

/** The size in pixels of a cell, and of the small map in it (0 if none fits): `[across, tall, side]`. */
function cellSizes() {
  const across = ($("heads").clientWidth - headsMargin(false).l - headsMargin(false).r) / data.width;
  const tall = Math.min(across + STRIP - 2, 560 / data.layers.length);
  const side = Math.floor(Math.min(across - 5, tall - STRIP - 3));
  return [across, tall, side >= LEAST ? side : 0];
}
const posterSide = () => cellSizes()[2];

/**
 * A small map of every head, as one picture over the cells of the labels.
 * @param {ChartSpec} spec
 * @param {number} side
 */
function posterMarks({ area, toX, toY }, side) {
  const scale = devicePixelRatio;
  const canvas = el("canvas", { width: Math.round(area.width * scale), height: Math.round(area.height * scale) });
  const [pen, tile] = [canvas.getContext("2d"), el("canvas")];
  pen.imageSmoothingEnabled = false;
  for (const row of data.rows) {
    if (state.only && !hasLabel(row, state.only)) continue;
    const { shape: [, n, m], values } = maps[row.layer];
    const cells = Math.min(Math.round(side * scale), Math.max(n, m));
    const z = Array.from({ length: cells }, () => new Float32Array(cells).fill(NaN));
    writeTile(z, 0, 0, row.of, values.subarray(row.head * n * m, (row.head + 1) * n * m), cells);
    paintCells(tile, { z, low: 0, high: 1, stops: VIRIDIS }, cells, cells);
    const [left, top] = [(toX(row.head) - area.x - side / 2) * scale, (toY(row.layer + 0.5) - area.y - side - 3) * scale];
    pen.fillStyle = css("--panel");
    pen.fillRect(left, top, side * scale, side * scale);
    pen.drawImage(tile, left, top, side * scale, side * scale);
  }
  return [drawn("image", { ...area, href: canvas.toDataURL() })];
}

/** The text in cells of `across` by `tall` pixels: a value, or the label's glyph and name. */
function headsWords(grid, across, tall, side) {
  const column = data.column.get(state.statistic);
  if (across < (column ? 34 : 13) || tall < 13) return [];
  return data.rows.filter(({ layer, head }) => grid.z[layer][head] !== null).map((row) => {
    const place = { x: row.head, y: row.layer - (side ? 0.5 - (STRIP / 2 + 1.5) / tall : 0), color: inkOn(hex(cellColor(grid, grid.z[row.layer][row.head]))) };
    if (column) return { ...place, text: figure(row[column.key], column) };
    const text = across < 44 ? "" : brief(row, across);
    return { ...place, text, path: row.labels.length || across < 44 ? styleOf(firstLabel(row)).glyph : undefined };
  });
}

/** The name of a layer on an axis: its number, after its input if the model has more than one kind of layer. */
export const layerName = (index, look = data) => `${look.layers[index].reads} ${index}`.trim();
export const layersTitle = (look = data) => (look.read.length > 1 ? "" : "layer");
/** The width in pixels of the names of layers. */
export const namesRoom = (look = data) => Math.min(150, 46 + 6.5 * Math.max(...look.layers.map(({ reads }) => reads.length)));

/** The margins of a map of heads, with space for the names of layers and, with `bar`, for the color bar. */
export const headsMargin = (bar, look = data) => ({ l: namesRoom(look), r: bar ? 52 : 6, t: 6, b: 40 });

/** The layout of a chart of layers by heads that is `width` pixels wide, with a frame around `row`. */
export function headsLayout(width, margin, row, look = data) {
  const count = look.layers.length;
  const every = (room, most) => Math.max(1, Math.ceil(most / room));
  const [down, across] = [every(26, count), every((width - margin.l - margin.r) / 24, look.width)];
  const numbers = (most, step) => Array.from({ length: Math.ceil(most / step) }, (_, index) => index * step);
  return {
    width, height: Math.max(12, Math.min(56, 400 / count)) * count + margin.t + margin.b, margin,
    frames: row ? frame(row.head, row.layer) : [],
    x: { title: "head", range: [-0.5, look.width - 0.5], ticks: numbers(look.width, across).map((head) => [head, String(head)]) },
    y: { title: layersTitle(look), range: [count - 0.5, -0.5], ticks: numbers(count, down).map((layer) => [layer, layerName(layer, look)]) },
  };
}

function drawHeads() {
  const column = data.column.get(state.statistic);
  const width = $("heads").clientWidth;
  const margin = headsMargin(column);
  const grid = headsCells();
  const layout = headsLayout(width, margin, chosen());
  const side = column ? 0 : posterSide();
  if (side) layout.height = cellSizes()[1] * data.layers.length + margin.t + margin.b;
  const [across, tall] = [(width - margin.l - margin.r) / data.width, (layout.height - margin.t - margin.b) / data.layers.length];
  const box = picture("heads", {
    ...layout, grid, words: headsWords(grid, across, tall, side), over: side ? (spec) => posterMarks(spec, side) : undefined, ramp: column ? roundTicks(grid.low, grid.high) : undefined,
    says: column ? { title: `${column.title}, every head`, scale: `${column.meaning} In ${column.unit === "share" ? "fractions of the weight" : column.unit}.` }
      : { title: side ? "The attention map of every head" : "The first label of every head", scale: `Each cell is a head; its color and glyph show its first label.${side ? POSTER : ""}`, labels: data.labels.filter((name) => data.rows.some((one) => firstLabel(one) === name)) },
    click: ({ column: head, row: layer }) => choose(rowAt(layer, head)),
    hover: (event, { column: head, row: layer }) => peek({ row: rowAt(layer, head) }),
    leave: () => peek({}),
  });
  const title = column?.title ?? "Label";
  box.setAttribute("aria-label",
    `Map of heads: ${title}, ${counted(data.layers.length, "layer")}; selected: ${headName(chosen())}. The table has all metrics`);
  $("heads-what").textContent = `Each cell is a head${side ? " with its attention map" : ""}; ${column
    ? `its color shows one metric: ${title}.` : "its color and glyph show its first label."}`;
  $("what").textContent = column?.meaning ?? "";
  drawLegend();
}

/**
 * Returns true if a rule could be evaluated for at least one head.
 * @param {Rule} rule
 */
export const evaluated = ({ key, given }) => data.rows.some((row) => [key, ...(given ? [given[0]] : [])].every((one) => typeof row[one] === "number"));
/**
 * Returns true if a rule is about the first token and that is the class token, whose label has a different name.
 * @param {Rule} rule
 */
export const ofClass = ({ key }) => key === "first" && data.rows.every(({ cls }) => typeof cls === "number");

/** Draws the labels with their numbers of heads; one can be selected. With labels on the map, it adds glyphs and lists unused labels. */
function drawLegend() {
  const ofLabels = state.statistic === "label";
  const counts = data.labels.map((name) => ({ name, count: data.rows.filter((row) => hasLabel(row, name)).length }));
  const lines = counts.filter(({ count }) => count).map(({ name, count }) => {
    const first = data.rows.filter((row) => firstLabel(row) === name).length;
    const further = first < count ? el("small", {}, ` (${whole(count - first)} as an additional label)`) : "";
    const button = el("button", { type: "button", "aria-pressed": String(state.only === name) },
      ...(ofLabels ? [glyph(name)] : []), `${name} `, el("b", {}, whole(count)), further);
    button.addEventListener("click", () => {
      state.only = state.only === name ? "" : name;
      remember();
      redraw();
    });
    return el("li", {}, button);
  });
  $("legend").replaceChildren(...lines);
  const rulesOf = (name) => data.rules.filter((rule) => rule.label === name);
  const missing = ofLabels ? counts.filter(({ name, count }) => !count && name !== NONE && !rulesOf(name).some(ofClass)).map(({ name }) => name) : [];
  const tried = (name) => rulesOf(name).some(evaluated);
  const said = (words, names) => (names.length ? `${words}: ${names.join(", ")}. ` : "");
  $("missing").textContent = said("Found in no head", missing.filter(tried)) + said("Not evaluated here", missing.filter((name) => !tried(name)));
}

export function connectHeads() {
  $("statistic-menu").addEventListener("change", () => chooseStatistic($("statistic-menu").value));
  moveByKeys("heads");
}

/** Lets the arrow keys choose a neighboring head in a chart of heads with layers from top to bottom. */
export function moveByKeys(id) {
  $(id).addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    const { layer, head } = chosen();
    const next = data.layers[layer + move[0]];
    if (next) choose(rowAt(layer + move[0], Math.min(head + move[1], next.maps.shape[0] - (move[0] ? 1 : 0))));
  });
}
