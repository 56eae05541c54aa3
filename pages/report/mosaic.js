// All heads' maps in one picture.

import { reframe } from "../shared/chart.js";
import { numbers } from "../shared/codec.js";
import { $, dark, el, switches } from "../shared/dom.js";
import { VIRIDIS } from "../shared/draw.js";
import { hideTip, showTip } from "../shared/tip.js";
import { counted, headName } from "../shared/words.js";
import { address } from "./address.js";
import { choose, redraw, remember } from "./choice.js";
import { layerName, layersTitle, namesRoom } from "./heads.js";
import { headTip } from "./labels.js";
import { allLabels, data, firstLabel } from "./look.js";
import { ahead } from "./map.js";
import { picture } from "./save.js";
import { chosen, state } from "./state.js";

const CELLS = 1_100_000;  // maximum number of cells in the mosaic

export const mosaicView = {
  title: "All maps",
  kept: { maps: [() => mosaic.order, (value) => { if (["layer", "label"].includes(value)) mosaic.order = value; }] },
  load: () => Promise.all(data.layers.map((layer) => numbers(layer.maps))),
  draw(maps) {
    switches($("mosaic-orders"), "mosaic-order", [["layer", "by layer and head"], ["label", "by label"]], mosaic.order, (order) => {
      mosaic.order = order;
      remember();
      redraw();
    });
    drawMosaic(maps);
  },
};

const mosaic = { order: "layer", places: [], columns: 0, lines: 0, square: 0, side: 0, step: 0, drawn: "" };

/** Row indices sorted by first label. */
export const byLabel = () => data.rows.map((_, index) => index).sort((a, b) =>
  data.labels.indexOf(firstLabel(data.rows[a])) - data.labels.indexOf(firstLabel(data.rows[b])) || a - b);

/** The [line, column] of each row's tile: a grid of layers by heads, or lines filled one after another in label order. */
function mosaicPlaces() {
  if (mosaic.order === "layer") return data.rows.map(({ layer, head }) => [layer, head]);
  const columns = Math.max(data.width, Math.ceil(Math.sqrt(data.rows.length)));
  const places = [];
  byLabel().forEach((row, place) => { places[row] = [Math.floor(place / columns), place % columns]; });
  return places;
}

/** Writes a head's map into the grid `z` as `side` by `side` cells; each shows the largest weight in its area. */
export function writeTile(z, top, left, layer, map, side) {
  const [n, m] = [layer.rows.cells, layer.cols.cells];
  const [down, across] = [Math.max(n, side), Math.max(m, side)];
  for (let i = 0; i < down; i++) {
    const line = z[top + Math.floor((i * side) / down)];
    const query = Math.floor((i * n) / down);
    let end = m;
    while (layer.causal && end > 0 && ahead(layer, query, end - 1)) end--;
    for (let j = 0; j < across; j++) {
      const key = Math.floor((j * m) / across);
      if (key >= end) break;
      const place = left + Math.floor((j * side) / across);
      const value = Math.sqrt(map[query * m + key]);
      if (!(line[place] >= value)) line[place] = value;
    }
  }
}

/** Lays the tiles out in a box `room` pixels wide: sets their places, their number of cells and their size in pixels. */
function layTiles(room) {
  mosaic.places = mosaicPlaces();
  mosaic.columns = 1 + Math.max(...mosaic.places.map(([, column]) => column));
  mosaic.lines = 1 + Math.max(...mosaic.places.map(([line]) => line));
  mosaic.square = Math.min(room / mosaic.columns, 220);
  const sides = [...new Set(data.layers.flatMap(({ rows, cols }) => [rows.cells, cols.cells]))];
  const most = Math.min(1.5 * mosaic.square, Math.sqrt(CELLS / (mosaic.columns * mosaic.lines)) - 1);
  // If all maps have the same size, a tile has at most as many cells as its map; otherwise it has more, so that maps of any size fit.
  mosaic.side = Math.max(6, Math.floor(Math.min(most, sides.length === 1 ? sides[0] : 4 * Math.max(...sides))));
  mosaic.step = mosaic.side + Math.max(1, Math.round(mosaic.side / 24));
}

/** All tiles as one grid of cells. */
function mosaicCells(maps) {
  const { step, side } = mosaic;
  const z = Array.from({ length: mosaic.lines * step }, () => new Float32Array(mosaic.columns * step).fill(NaN));
  data.rows.forEach((row, index) => {
    const { shape, values } = maps[row.layer];
    const size = shape[1] * shape[2];
    const [line, column] = mosaic.places[index];
    writeTile(z, line * step, column * step, row.of, values.subarray(row.head * size, (row.head + 1) * size), side);
  });
  return z;
}

/** Ticks at the middle of tiles, as many as are readable; none if tiles are not ordered by layer and head. */
function tileAxis(count, title, name = (/** @type {number} */ number) => String(number)) {
  if (mosaic.order !== "layer") return {};
  const every = Math.max(1, Math.ceil(20 / mosaic.square));
  const numbers = Array.from({ length: Math.ceil(count / every) }, (_, index) => index * every);
  return { title, ticks: numbers.map((number) => [number * mosaic.step + mosaic.side / 2 - 0.5, name(number)]) };
}

function drawMosaic(maps) {
  drawMosaicTitle();
  const width = $("mosaic").clientWidth;
  const order = [state.run, mosaic.order, width, dark.matches].join();
  if (order === mosaic.drawn) { reframe("mosaic", tileFrame()); return; }
  mosaic.drawn = order;
  const margin = { l: namesRoom(), r: 8, t: 8, b: 40 };
  layTiles(width - margin.l - margin.r);
  const { square, columns, lines, step } = mosaic;
  picture("mosaic", {
    width: square * columns + margin.l + margin.r, height: square * lines + margin.t + margin.b, margin, frames: tileFrame(),
    grid: { z: mosaicCells(maps), low: 0, high: 1, stops: VIRIDIS },
    says: {
      title: "Every head’s map", scale: `Weight of each query (down) on each key (across), layers down and heads across${mosaic.order === "layer" ? "" : ", by label"}.`,
      marks: [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1].map((mark) => [Math.sqrt(mark), String(mark)]),
    },
    x: { range: [-0.5, columns * step - 0.5], ...tileAxis(columns, "head") },
    y: { range: [lines * step - 0.5, -0.5], ...tileAxis(lines, layersTitle(), layerName) },
    click: (place) => choose(tileAt(place)),
    hover: (event, place) => {
      const row = data.rows[tileAt(place)];
      if (row) showTip(event, headTip(row));
      else hideTip();
    },
  });
}

/** The index of the row whose tile is at a point. */
function tileAt({ x, y }) {
  const [line, column] = [Math.floor(y / mosaic.step), Math.floor(x / mosaic.step)];
  return mosaic.places.findIndex(([a, b]) => a === line && b === column);
}

function tileFrame() {
  const [line, column] = mosaic.places[state.row];
  const [x, y] = [column * mosaic.step - 1, line * mosaic.step - 1];
  return [{ x0: x, x1: x + mosaic.side + 1, y0: y, y1: y + mosaic.side + 1, plain: true }];
}

function drawMosaicTitle() {
  $("mosaic-head").replaceChildren(el("b", {}, headName(chosen())), `: ${allLabels(chosen())}. `, el("a", { href: address("head") }, "Show this head"));
  $("mosaic").setAttribute("aria-label", `Maps of all ${counted(data.rows.length, "head")}; selected: ${headName(chosen())}`);
}
