// Two looks side by side: what changed, layer by layer and head by head, and the same head's text and maps in both.

import { cellColor, frame, roundTicks, turnedRoom } from "../shared/chart.js";
import { $, el } from "../shared/dom.js";
import { hex, inkOn } from "../shared/draw.js";
import { hideTip, showTip } from "../shared/tip.js";
import { counted, headName, unitName, whole } from "../shared/words.js";
import { drawArcs, layText } from "./arcs.js";
import {
  bothColumns, bothHeads, changeOf, changeWords, headChanges, layerChanges, nameOf, rankedColumns, sameHead, spanOf,
} from "./changes.js";
import { choose, chooseToken, redraw, remember } from "./choice.js";
import { lossOf } from "./header.js";
import { diverging, headsGrid, headsLayout, headsMargin, layerName, layersTitle, namesRoom } from "./heads.js";
import { briefTitle, headButton } from "./labels.js";
import { data, firstLabel, runs } from "./look.js";
import { drawMap, mapRows } from "./map.js";
import { guidesOf } from "./proof.js";
import { picture } from "./save.js";
import { sentence } from "./sentence.js";
import { chosen, state } from "./state.js";
import { drawPieceSwitch } from "./story.js";
import { headRows, strongest } from "./weights.js";
import { figure, signed } from "./words.js";

export const compareView = {
  title: "Compare",
  kept: {
    change: [() => comparing.key ?? "", (value) => { if (data.column.has(value)) comparing.key = value; }],
    layer: [() => comparing.layer, (value) => { if (/^\d*$/.test(value)) comparing.layer = value; }],
  },
  there: () => runs.length === 2,
  async load() {
    const rows = runs.map((_, run) => sameHead(chosen(), run));
    return Promise.all(rows.map((row) => row && headRows(row)));
  },
  draw(both) {
    drawChanges();
    drawStrip();
    drawDifferences();
    drawBoth(both);
  },
};

const comparing = { key: undefined, layer: "" };  // the metric, and the layer whose heads are listed ("" for all)

// --- what changed ------------------------------------------------------------------------------

const SENTENCES = 7;

function drawChanges() {
  const found = headChanges();
  if (!bothColumns().some(({ key }) => key === comparing.key)) comparing.key = (found[0]?.column ?? rankedColumns()[0] ?? bothColumns()[0])?.key;
  const labels = found.filter(({ label }) => label).length;
  const [first, second] = runs.map(({ title }) => title);
  $("compare-what").replaceChildren(el("b", {}, "A "), `${first}; `, el("b", {}, "B "), `${second}. `,
    `${whole(bothHeads().length)} of ${counted(runs[0].rows.length, "head")} of A have a match in B (same module and head index). Differences are B − A.`);
  const line = (name, words) => el("li", {}, el("b", {}, name), `: ${words}`);
  $("losses").replaceChildren(...(runs.some(lossOf) ? runs.map((run, place) => line("AB"[place], lossOf(run) ? `loss ${lossOf(run)}` : "no loss was measured")) : []));
  const [before, after] = runs.map(({ provenance }) => provenance);
  if (before.loss === after.loss && [before, after].every(({ loss_text: loss }) => typeof loss === "number")) {
    $("losses").append(line("B − A", `${signed(after.loss_text - before.loss_text, { digits: 2 })} nats of loss`));
  }
  const left = bothColumns().filter((column) => !rankedColumns().includes(column));
  if (left.length) {
    const lengths = runs.map(({ read }) => read.map(({ tokens }) => whole(tokens.length)).join(" and "));
    const names = left.map(({ title }) => title[0].toLowerCase() + title.slice(1));
    $("compare-what").append(el("b", {}, ` A has ${lengths[0]} tokens, B has ${lengths[1]}. Metrics that grow with the length, and labels based on them, are left out of the ranking: ${names.join("; ")}.`));
  }
  $("changed").textContent = !found.length ? "No head’s metrics differ."
    : labels ? `${counted(labels, "label")} changed. Label changes come first, then the largest metric changes:` : "No head’s label changed. The largest changes:";
  $("changes").replaceChildren(...found.slice(0, SENTENCES).map((change) => {
    const button = headButton(change.a, () => chooseChange(change.a, change.column.key, ""));
    return el("li", {}, button, " ", ...changeWords(change));
  }));
}

/** Chooses a head of A and a metric, and lists the heads of one layer, or of all layers. */
function chooseChange(a, key, layer) {
  Object.assign(comparing, { key, layer });
  return choose(data.byName.get(nameOf(a)) ?? state.row);
}

/** Draws layers by metrics: how much the mean over a layer's heads changed. */
function drawStrip() {
  const columns = rankedColumns();
  const layers = columns.length ? layerChanges(columns) : [];
  $("strip-panel").hidden = !layers.length;
  if (!layers.length) return;
  const z = layers.map(({ means }) => means.map((mean, place) => mean / spanOf(columns[place])));
  const end = Math.max(1e-9, ...z.flat().filter((value) => !Number.isNaN(value)).map(Math.abs));
  const width = $("strip").clientWidth;
  const across = (width - namesRoom(runs[0]) - 10) / columns.length;
  const turned = across < 34 ? 90 : 40;
  const margin = { l: namesRoom(runs[0]), r: 10, t: 6, b: turnedRoom(columns.map(briefTitle), turned, false) };
  const tall = Math.max(12, Math.min(36, 480 / layers.length));
  const grid = { z, low: -end, high: end, stops: diverging(), gap: 2 };
  const [line, column] = [layers.findIndex(({ layer }) => String(layer) === comparing.layer), columns.findIndex(({ key }) => key === comparing.key)];
  const every = Math.ceil(18 / tall);
  const at = ({ column: place, row }) => ({ layer: layers[row], one: columns[place] });
  picture("strip", {
    says: { title: "Mean change of each metric, layer by layer, B − A", scale: "Orange means higher in B, blue higher in A; colors show the change relative to the metric’s range over all heads." },
    width, height: tall * layers.length + margin.t + margin.b, margin, grid, frames: line < 0 ? [] : frame(column, line),
    x: { range: [-0.5, columns.length - 0.5], ticks: columns.map((one, place) => [place, briefTitle(one)]), turned },
    y: {
      range: [layers.length - 0.5, -0.5], title: layersTitle(runs[0]),
      ticks: layers.map(({ layer }, place) => [place, layerName(layer, runs[0])]).filter((_, place) => place % every === 0),
    },
    words: across < 44 || tall < 15 ? [] : layers.flatMap(({ means }, y) => means.map((mean, x) => [mean, x, y]).filter(([mean]) => !Number.isNaN(mean))
      .map(([mean, x]) => ({ x, y, text: Math.abs(mean) < 0.5 * 10 ** -columns[x].digits ? "·" : signed(mean, columns[x]), color: inkOn(hex(cellColor(grid, z[y][x]))) }))),
    click: (place) => {
      const { layer, one } = at(place);
      if (layer && one) chooseChange(mostChanged(layer.heads, one.key).a, one.key, String(layer.layer));
    },
    hover: (event, place) => {
      const { layer, one } = at(place);
      if (!layer || !one) return hideTip();
      const mean = layer.means[place.column];
      return showTip(event, [[`Layer ${layer.layer}`, null, counted(layer.heads.length, "head")],
        [`${one.title}, mean change`, null, Number.isNaN(mean) ? "–" : signed(mean, one) + unitName(one)]]);
    },
  }).setAttribute("aria-label", `Mean change of each metric in each of ${counted(layers.length, "layer")}; the table below lists the heads of a layer`);
}

const mostChanged = (heads, key) => heads.reduce((best, pair) => (Math.abs(changeOf(pair, key) ?? 0) > Math.abs(changeOf(best, key) ?? 0) ? pair : best));

// --- one metric --------------------------------------------------------------------------------

function drawDifferences() {
  const column = runs[0].column.get(comparing.key);
  $("difference-menu").replaceChildren(...bothColumns().map(({ key, title }) => el("option", { value: key }, title)));
  $("difference-menu").value = comparing.key ?? "";
  const layers = [...new Set(bothHeads().map(({ a }) => a.layer))];
  $("layer-menu").replaceChildren(el("option", { value: "" }, "all layers"), ...layers.map((layer) => {
    return el("option", { value: String(layer) }, `layer ${layerName(layer, runs[0])}`);
  }));
  $("layer-menu").value = comparing.layer;
  const there = column ? bothHeads().map((pair) => ({ ...pair, change: changeOf(pair, column.key) })).filter(({ change }) => change !== null) : [];
  $("difference-panel").hidden = !there.length;
  if (!there.length) return;
  drawDifferenceMap(column, there);
  drawDifferenceTable(column, there);
}

/** Draws the heads of A, colored by B − A. */
function drawDifferenceMap(column, there) {
  const [look] = runs;
  const changes = new Map(there.map(({ a, change }) => [a, change]));
  const end = Math.max(1e-9, ...[...changes.values()].map(Math.abs));
  const margin = headsMargin(true, look);
  const rowUnder = ({ column: head, row: layer }) => look.rows[look.places.get(`${layer}.${head}`)];
  picture("differences", {
    says: { title: `${column.title}: B − A, head by head`, scale: `In ${column.unit === "share" ? "fractions of the weight" : column.unit}; orange means higher in B, blue higher in A.` },
    ...headsLayout($("differences").clientWidth, margin, sameHead(chosen(), 0), look),
    grid: { z: headsGrid((row) => changes.get(row), look), low: -end, high: end, stops: diverging(), gap: 2 }, ramp: roundTicks(-end, end),
    click: (place) => { if (rowUnder(place)) choose(data.byName.get(nameOf(rowUnder(place)))); },
    hover: (event, place) => {
      const row = rowUnder(place);
      if (!changes.has(row)) return hideTip();
      return showTip(event, [[headName(row), null, row.of.reads], ["B − A", null, signed(changes.get(row), look.column.get(comparing.key))]]);
    },
  }).setAttribute("aria-label", `Differences in ${column.title.toLowerCase()}, head by head; the table beside it lists the largest`);
}

/** Lists the heads of one layer in A and B, or the heads of all layers that changed most. */
function drawDifferenceTable(column, there) {
  const one = comparing.layer !== "";
  $("difference-title").textContent = one ? `${column.title}: the heads of layer ${comparing.layer}` : `${column.title}: the largest differences`;
  const listed = one ? there.filter(({ a }) => String(a.layer) === comparing.layer) : there;
  const order = [...listed].sort((x, y) => Math.abs(y.change) - Math.abs(x.change)).slice(0, one ? Infinity : 40);
  $("difference-table").tBodies[0].replaceChildren(...order.map(({ a, b, change }) => {
    const line = el("tr", { class: nameOf(a) === nameOf(chosen()) ? "chosen" : "", title: a.module }, el("th", { scope: "row" }, headButton(a, null, "")),
      ...[a, b].map((row) => el("td", {}, figure(row[column.key], column))), el("td", {}, el("b", {}, signed(change, column))),
      el("td", { class: "words" }, firstLabel(a) === firstLabel(b) ? firstLabel(a) : `${firstLabel(a)} → ${firstLabel(b)}`));
    line.addEventListener("click", () => choose(data.byName.get(nameOf(a))));
    return line;
  }));
}

// --- one head in both --------------------------------------------------------------------------

let bothShown = [];  // the data of the head in A and in B, for the event handlers

/** Draws the chosen head's text and map in A and in B, and the difference of the maps if their cells are the same. */
function drawBoth(both) {
  bothShown = both;
  const rows = runs.map((_, run) => sameHead(chosen(), run));
  $("both-title").textContent = headName(chosen());
  $("both-module").textContent = chosen().module;
  drawPieceSwitch("both-pieces", chosen());
  rows.forEach((row, run) => {
    for (const part of ["told", "map"]) $(`both-${part}-${run}`).parentElement.hidden = !row;
    if (!row) return;
    drawMap(`both-map-${run}`, row, both[run].layer, both[run].map, { small: true, guides: guidesOf(row, both[run].layer) }, "AB"[run])
      .setAttribute("aria-label", `Map of the head in ${"AB"[run]}`);
  });
  drawBothTold(state.token);
  const axes = ["rows", "cols"].map((axis) => both.map((one) => one?.layer[axis]));
  const same = rows.every(Boolean) && axes.every(([a, b]) => a.cells === b.cells && a.count === b.count);
  $("both-map-2").parentElement.hidden = !same;
  $("both-what").textContent = same ? aboutDifference(both) : rows.every(Boolean)
    ? "The two maps differ in size and cannot be subtracted; use the same number of tokens in both." : "Only one of the two has this head.";
  if (!same) return;
  const { layer, map } = both[0];
  const change = mapRows(layer, both[1].map.map((value, place) => value - map[place]), (value) => Math.sign(value) * Math.sqrt(Math.abs(value)));
  const says = {
    title: `${headName(rows[0])}, B − A`, scale: "Change in the weight of each query (down) on each key (across): orange means more in B, blue more in A; square roots.",
    marks: [[-1, "−1"], [-0.5, "−0.25"], [0, "0"], [0.5, "0.25"], [1, "1"]], random: layer.isTwin,
  };
  drawMap("both-map-2", rows[0], layer, map, { small: true, says, grid: { z: change, low: -1, high: 1, stops: diverging() } })
    .setAttribute("aria-label", "Difference of the two maps: orange where B has more weight, blue where A has more");
}

/** Shows what the head does at a token in A and in B; both texts share one cursor. */
function drawBothTold(at) {
  bothShown.forEach((rows, run) => {
    if (!rows) return;
    const row = sameHead(chosen(), run);
    const token = Math.min(at, rows.layer.from.tokens.length - 1);
    const found = strongest(rows, token);
    $(`both-sentence-${run}`).replaceChildren(...sentence(row, rows.layer, token, found));
    layText($(`both-told-${run}`), rows.layer, {
      over: drawBothTold, out: () => drawBothTold(state.token), pick: (index) => chooseToken(index, "to"),
    });
    drawArcs($(`both-told-${run}`), row, rows, token, found);
  });
}

/** Explains the difference of the maps, and says so if A and B have different tokens. */
function aboutDifference([a, b]) {
  const differ = ["from", "to"].some((side) => a.layer[side].tokens.some((token, index) => token !== b.layer[side].tokens[index]));
  return (differ ? "The tokens differ between A and B: positions are compared, not words. " : "") +
    "In the difference, orange means more weight in B, blue more in A; colors follow the square root, as in the maps.";
}

export function connectCompare() {
  $("difference-menu").addEventListener("change", () => { comparing.key = $("difference-menu").value; remember(); redraw(); });
  $("layer-menu").addEventListener("change", () => { comparing.layer = $("layer-menu").value; remember(); redraw(); });
}
