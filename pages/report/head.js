// One head: its map beside the text, and its metrics, distances, entropy and token pairs.

import { roundTicks } from "../shared/chart.js";
import { ofHead } from "../shared/codec.js";
import { $, coarse, el, switches } from "../shared/dom.js";
import { showTip } from "../shared/tip.js";
import { headName, percent, unitName, weight } from "../shared/words.js";
import { chooseToken, redraw, remember } from "./choice.js";
import { labelLines } from "./labels.js";
import { blocks, data } from "./look.js";
import { SCALES, ahead, drawMap, mapTip, wholeRanges } from "./map.js";
import { drawOffsets } from "./offsets.js";
import { drawProfile, guideWords, guidesOf } from "./proof.js";
import { picture } from "./save.js";
import { visibleKeys } from "./sentence.js";
import { chosen, chosenQuery, sceneOf, state } from "./state.js";
import { drawPieceSwitch } from "./story.js";
import { drawText, loadText } from "./text.js";
import { headRows, strongest } from "./weights.js";
import { figure, rounded, tokenCode, tokenName } from "./words.js";

/** @type {HeadRows} */
let headShown;  // the data of the head that is drawn, for the event handlers

export const headView = {
  title: "Head",
  async load() {
    const row = chosen();
    const layer = row.of;
    const [rows, entropy, offsets, heads] = await Promise.all([
      headRows(row), ofHead(layer.entropy, row.head), layer.offsets && ofHead(layer.offsets, row.head), loadText(),
    ]);
    return { rows: { ...rows, entropy, offsets }, heads };
  },
  draw({ rows, heads }) {
    headShown = rows;
    drawTitle();
    drawWholeMap();
    drawText(heads);
    drawReadout();
    drawProfile(chosen());
    drawOffsets(rows);
    drawEntropy();
    drawPairs();
  },
};

function drawTitle() {
  const row = chosen();
  const { layer } = headShown;
  $("head-title").textContent = headName(row);
  const streams = layer.kind === "cross" ? `${layer.from.name} attends to ${layer.to.name}` : layer.reads;
  $("head-module").replaceChildren(el("code", {}, row.module), streams ? ` · ${streams}` : "");
  $("head-labels").replaceChildren(...labelLines(row));
  const [rows, cols] = [layer.rows, layer.cols];
  const size = ({ count, cells }) => [...new Set([Math.floor(count / cells), Math.ceil(count / cells)])].join(" or ");
  const cells = rows.exact && cols.exact ? "Each cell is one query and one key."
    : `Each cell is the weight that a block of ${size(rows)} queries puts on a block of ${size(cols)} keys, on average.`;
  $("head-what").textContent = `${cells} A row sums to 1${layer.causal ? "; keys after the query are masked and left blank" : ""}.`;
  $("proof").textContent = guideWords(row, layer, headShown.map);
  $("map-help").textContent = coarse.matches ? "Tap a cell to select its query; use the buttons to zoom."
    : "Drag to zoom in; click or use the arrow keys to select a query.";
  drawPieceSwitch("head-pieces", row);
  $("of-text").hidden = sceneOf(row) === row.of;
  switches($("scales"), "scale", SCALES, state.scale, (scale) => { state.scale = scale; remember(); redraw(); });
}

/** The frame around the row of the chosen query. */
function queryFrame() {
  const { layer } = headShown;
  const query = chosenQuery();
  if (query < 0) return [];
  const cell = layer.rows.cell(query);
  let end = layer.cols.cells;
  while (layer.causal && end > 1 && ahead(layer, cell, end - 1)) end--;
  return [{ x0: -0.5, x1: end - 0.5, y0: cell - 0.5, y1: cell + 0.5, plain: true, width: 1.5 }];
}

function drawWholeMap() {
  const { layer, map } = headShown;
  const box = drawMap("map", chosen(), layer, map, {
    frames: queryFrame(), guides: guidesOf(chosen(), layer),
    hover: (event, place) => mapTip(event, place, headShown.layer, headShown.map),
    click: ({ row }) => chooseToken(headShown.layer.rows.start(row), "to"),
    zoom: (ranges) => { state.ranges = ranges; remember(); drawWholeMap(); },
  });
  box.setAttribute("aria-label",
    `Attention map of ${headName(chosen())}, ${layer.rows.cells} by ${layer.cols.cells} cells; the text beside it shows the chosen query's keys`);
  $("zoom-out").disabled = $("zoom-whole").disabled = state.ranges === undefined;
}

/** Zooms by a factor around the chosen query and the key that it attends to most; 0 shows the whole map. */
function zoom(factor) {
  const { layer } = headShown;
  const before = state.ranges ?? wholeRanges(layer);
  const query = Math.max(0, chosenQuery());
  const [key] = strongest(headShown, query)[0] ?? [0];
  const around = (range, at, cells, flip) => {
    const size = Math.min(cells, Math.max(6, Math.abs(range[1] - range[0]) * factor));
    const low = Math.min(Math.max(-0.5, at - size / 2), cells - 0.5 - size);
    return flip ? [low + size, low] : [low, low + size];
  };
  const ranges = {
    xaxis: around(before.xaxis, layer.cols.cell(key), layer.cols.cells, false),
    yaxis: around(before.yaxis, layer.rows.cell(query), layer.rows.cells, true),
  };
  const all = wholeRanges(layer);
  const whole = factor === 0 || (String(ranges.xaxis) === String(all.xaxis) && String(ranges.yaxis) === String(all.yaxis));
  state.ranges = whole ? undefined : ranges;
  remember();
  drawWholeMap();
}

function drawReadout() {
  const row = chosen();
  const there = data.columns.filter(({ key }) => typeof row[key] === "number");
  $("readout").replaceChildren(...there.map((column) => {
    const { key, title, unit } = column;
    const [value, coverage, error] = [row[key], row[`${key}_coverage`], row[`${key}_se`]];
    const term = el("dt", {}, title);
    if (typeof coverage === "number" && coverage < 0.995) term.append(" ", el("small", {}, `on ${percent(coverage)}`));
    const shown = el("dd", {}, figure(value, column) + unitName(column));
    if (typeof error === "number") shown.append(" ", el("small", {}, `± ${figure(error, column)}`));
    const line = el("div", { class: unit === "share" ? "share" : "" }, term, shown);
    if (unit === "share") line.style.setProperty("--w", Math.min(1, value));
    return line;
  }));
}

function drawEntropy() {
  const { entropy } = headShown;
  const layer = chosen().of;
  const cut = blocks(layer.from.tokens.length, entropy.length);
  const places = [...entropy].map((_, cell) => cut.start(cell));
  const bound = places.map((place) => [place, Math.log(Math.max(1, visibleKeys(layer, place)))]);
  const points = [...entropy].map((value, cell) => [places[cell], value]);
  const values = [...entropy].filter((value) => !Number.isNaN(value));
  const query = state.on === "text" ? chosenQuery() : -1;
  const top = 1.05 * Math.max(...bound.map(([, value]) => value), ...values, 0.1);
  const [least, most] = [-0.5, layer.from.tokens.length - 0.5];
  picture("entropies", {
    width: $("entropies").clientWidth, height: 240, margin: { l: 44, r: 10, t: 8, b: 44 },
    lines: [{ points: bound, color: "--muted", width: 1, dash: "1 3" }, { points, color: "--accent", dots: places.length <= 60 }],
    frames: query < 0 ? [] : [{ x0: query, x1: query, y0: 0, y1: top, plain: true, width: 1.5 }],
    x: { title: "position of the query", range: [least, most], ticks: roundTicks(0, most, 6).filter(([place]) => Number.isInteger(place)) },
    y: { title: "nats", range: [0, top], ticks: roundTicks(0, top), lines: true },
    hover: (event, { x }) => {
      const at = Math.max(0, Math.min(layer.from.tokens.length - 1, Math.round(x)));
      const value = entropy[cut.cell(at)];
      showTip(event, [["query", tokenName(layer.from, at), `at ${at}`], ["entropy", null, Number.isNaN(value) ? "–" : `${value.toFixed(2)} nats`]]);
    },
    click: ({ x }) => {
      state.on = "text";
      chooseToken(Math.round(x), "to");
    },
  });
  const range = values.length ? `from ${Math.min(...values).toFixed(2)} to ${Math.max(...values).toFixed(2)} nats` : "unknown";
  $("entropies").setAttribute("aria-label", `Entropy by position: ${range}`);
}

/**
 * Pairs of query and key tokens, sorted by their total weight.
 * @param {HeadRows} rows
 */
function tokenPairs({ layer, kept, ...rest }) {
  const pairs = new Map();
  for (let query = 0; query < layer.from.tokens.length; query++) {
    for (const [key, value] of strongest({ layer, kept, ...rest }, query)) {
      const name = JSON.stringify([layer.from.tokens[query], layer.to.tokens[key]]);
      const pair = pairs.get(name) ?? { query, key, best: 0, mass: 0, times: 0 };
      if (value > pair.best) [pair.query, pair.key, pair.best] = [query, key, value];
      pairs.set(name, { ...pair, mass: pair.mass + value, times: pair.times + 1 });
    }
  }
  return [...pairs.values()].sort((a, b) => b.mass - a.mass).slice(0, 12);
}

function drawPairs() {
  const { layer } = headShown;
  const all = layer.from.tokens.length;
  $("pairs").replaceChildren(...tokenPairs(headShown).map(({ query, key, mass, times }) => {
    const button = el("button", { type: "button", class: "plain" }, tokenCode(layer.from, query), " → ", tokenCode(layer.to, key));
    button.addEventListener("click", () => chooseToken(query, "to"));
    return el("li", {}, el("b", {}, rounded(mass / all)), button, el("small", {}, times > 1 ? `${times} times, ${weight(mass / times)} each` : weight(mass)));
  }));
}

export function connectHead() {
  $("zoom-in").addEventListener("click", () => zoom(0.5));
  $("zoom-out").addEventListener("click", () => zoom(2));
  $("zoom-whole").addEventListener("click", () => zoom(0));
  $("map").addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const { rows } = headShown.layer;
    chooseToken(rows.start(Math.max(0, Math.min(rows.cells - 1, rows.cell(Math.max(0, chosenQuery())) + step))), "to");
  });
}
