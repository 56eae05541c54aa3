// A graph of which heads read what other heads write, from the weights: layers from top to bottom, edges for the strongest pairs.

import { $, el, switches } from "../shared/dom.js";
import { showTip } from "../shared/tip.js";
import { counted, headName } from "../shared/words.js";
import { choose, redraw, remember } from "./choice.js";
import { headsLayout, headsMargin, moveByKeys } from "./heads.js";
import { headButton, headTip, labelColor, pointGlyph } from "./labels.js";
import { data, firstLabel } from "./look.js";
import { picture } from "./save.js";
import { drawLabelLegend } from "./scatter.js";
import { chosen, state } from "./state.js";

/** For each kind, its letter and the part of a later head that reads what a head writes. */
const KINDS = { K: "keys", Q: "queries", V: "values" };
const OWN = 2;  // number of the chosen head's pairs that are always shown: this many where it writes, and where it reads
const composing = { kind: "K", count: 0 };

export const compositionView = {
  title: "Composition",
  there: () => Boolean(data.composition?.unrelated),
  kept: {
    kind: [() => composing.kind, (value) => { if (KINDS[value]) composing.kind = value; }],
    edges: [() => String(composing.count), (value) => { if (/^\d+$/.test(value)) composing.count = Number(value); }],
  },
  draw() {
    const pairs = data.composition[composing.kind];
    const most = Math.max(1, Math.min(200, pairs.length));
    const count = Math.min(most, composing.count || Math.min(40, data.rows.length));
    const names = Object.entries(KINDS).map(([kind, read]) => [kind, `${kind}: ${read}`, `${kind}-composition: ${read} read what another head writes`]);
    switches($("composition-kinds"), "composition-kind", names, composing.kind, (kind) => { composing.kind = kind; remember(); redraw(); });
    $("composition-count").setAttribute("max", String(most));
    $("composition-count").value = $("composition-counted").textContent = String(count);
    $("composition-what").textContent = `An edge joins a head to a head of a later layer whose ${KINDS[composing.kind]} read what it writes. `
      + "The score is ‖AB‖ / (‖A‖ ‖B‖), where A and B are the matrices of the two heads (Elhage et al. 2021); it depends on the weights alone, not on the text. "
      + `Two unrelated heads score about ${data.composition.unrelated.toFixed(3)}.`;
    const edges = shownEdges(pairs, count);
    drawGraph(edges);
    drawEdgeTable(edges);
    drawLabelLegend("composition-legend", data.rows);
  },
};

/** The strongest pairs, and those of the chosen head that score above unrelated heads: `{ from, to, score, mine }`. */
function shownEdges(pairs, count) {
  const own = [0, 1].flatMap((side) => pairs.filter((pair) => pair[side] === state.row && pair[2] > data.composition.unrelated).slice(0, OWN));
  return pairs.filter((pair, place) => place < count || own.includes(pair))
    .map(([from, to, score]) => ({ from, to, score, mine: from === state.row || to === state.row }));
}

/** The points of a curve from a head down to another one. */
function curve(from, to) {
  return Array.from({ length: 17 }, (_, step) => {
    const t = step / 16;
    return [from.head + (to.head - from.head) * t * t * (3 - 2 * t), from.layer + (to.layer - from.layer) * t];
  });
}

function drawGraph(edges) {
  const margin = headsMargin(false);
  const layout = headsLayout($("composition").clientWidth, margin, null);
  const { unrelated } = data.composition;
  const most = Math.max(...edges.map(({ score }) => score), unrelated + 1e-9);
  const share = ({ score }) => Math.max(0, (score - unrelated) / (most - unrelated));
  const count = data.layers.length;
  const few = data.width <= 24;
  const linked = new Set(edges.flatMap(({ from, to }) => [from, to]));
  const box = picture("composition", {
    ...layout, height: Math.max(28, Math.min(120, 560 / count)) * count + margin.t + margin.b,
    lines: [...edges].sort((a, b) => Number(a.mine) - Number(b.mine) || a.score - b.score).map((edge) => ({
      points: curve(data.rows[edge.from], data.rows[edge.to]), color: edge.mine ? "--mark" : "--muted", width: 1 + 3.5 * share(edge),
      more: { class: "edge", "stroke-opacity": (edge.mine ? 0.95 : 0.25 + 0.45 * share(edge)).toFixed(2) },
    })),
    points: data.rows.map((row, index) => ({
      x: row.head, y: row.layer, row: index, size: index === state.row ? 20 : few ? 14 : 8, edge: index === state.row ? 2.2 : 0.7,
      color: labelColor(firstLabel(row)), path: pointGlyph(firstLabel(row)), faint: !few && !linked.has(index) && index !== state.row,
    })),
    says: {
      title: `${composing.kind}-composition: the ${counted(edges.length, "strongest pair")} of heads`,
      scale: `Edges run down, from the head that writes to the head whose ${KINDS[composing.kind]} read it; thicker is stronger, up to ${most.toFixed(3)}.`,
      labels: data.labels.filter((name) => data.rows.some((row) => firstLabel(row) === name)),
    },
    click: ({ point }) => choose(point.row),
    hover: (event, { point }) => {
      const partners = (mine, other) => edges.filter((edge) => edge[mine] === point.row).slice(0, 3).map((edge) => headName(data.rows[edge[other]])).join(", ");
      showTip(event, [...headTip(data.rows[point.row]), ["reads", null, partners("to", "from") || "none of these"], ["is read by", null, partners("from", "to") || "none of these"]]);
    },
  });
  box.setAttribute("aria-label", `Graph of ${composing.kind}-composition, ${counted(data.rows.length, "head")} and ${counted(edges.length, "edge")}; `
    + `selected: ${headName(chosen())}. The table beside it has every edge`);
}

/** Draws the table of all edges, with those of the chosen head first. */
function drawEdgeTable(edges) {
  const order = [...edges].sort((a, b) => Number(b.mine) - Number(a.mine) || b.score - a.score);
  $("composition-title").textContent = edges.some(({ mine }) => mine) ? `Strongest pairs, those of ${headName(chosen())} first` : "Strongest pairs";
  $("composition-read").textContent = `${KINDS[composing.kind]} of`;
  $("composition-table").tBodies[0].replaceChildren(...order.map(({ from, to, score, mine }) => {
    const [a, b] = [from, to].map((index) => data.rows[index]);
    const button = (row) => headButton(row, () => choose(data.rows.indexOf(row)), "");
    return el("tr", { class: mine ? "chosen" : "" }, el("th", { scope: "row" }, button(a)), el("td", { class: "words" }, button(b)),
      el("td", {}, el("b", {}, score.toFixed(3))), el("td", { class: "words" }, `${firstLabel(a)} → ${firstLabel(b)}`));
  }));
}

export function connectComposition() {
  moveByKeys("composition");
  $("composition-count").addEventListener("input", () => { composing.count = Number($("composition-count").value); remember(); redraw(); });
}
