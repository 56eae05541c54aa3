// The similarity of pairs of heads.

import { reframe, roundTicks } from "../shared/chart.js";
import { numbers } from "../shared/codec.js";
import { $, dark, el, switches } from "../shared/dom.js";
import { VIRIDIS } from "../shared/draw.js";
import { showTip } from "../shared/tip.js";
import { counted, headName, subscripts } from "../shared/words.js";
import { choose, redraw, remember } from "./choice.js";
import { headButton } from "./labels.js";
import { allLabels, data } from "./look.js";
import { byLabel } from "./mosaic.js";
import { picture } from "./save.js";
import { chosen, state } from "./state.js";

const likeness = { order: "layer", rows: [], drawn: "" };

export const likenessView = {
  title: "Similarity",
  kept: { alike: [() => likeness.order, (value) => { if (["layer", "label", "likeness"].includes(value)) likeness.order = value; }] },
  more: true,
  there: () => data.similarity !== null,
  load: () => numbers(data.similarity),
  draw({ values }) {
    switches($("likeness-orders"), "likeness-order",
      [["layer", "by layer and head"], ["label", "by label"], ["likeness", "by similarity"]], likeness.order, (order) => {
        likeness.order = order;
        remember();
        redraw();
      });
    drawLikeness(values);
    drawAlike(values);
  },
};

/** The similarity of rows a and b, from the stored pairs above the diagonal; NaN if they cannot be compared. */
function alike(values, a, b) {
  if (a === b) return 1;
  const [low, high] = a < b ? [a, b] : [b, a];
  return values[low * data.rows.length - (low * (low + 1)) / 2 + high - low - 1];
}

/** The similarity of every pair, with heads in the order of `likeness.rows`. */
function likenessGrid(values) {
  const { rows } = likeness;
  const count = rows.length;
  const start = rows.map((_, a) => a * count - (a * (a + 1)) / 2 - a - 1);  // index of the first pair of a, minus a + 1, so that adding b gives the pair
  return rows.map((a, i) => {
    const line = new Float32Array(count);
    for (let j = 0; j < count; j++) {
      const b = rows[j];
      line[j] = i === j ? 1 : values[a < b ? start[a] + b : start[b] + a];
    }
    return line;
  });
}

/** Rows in greedy order: each is the remaining row that is most similar to the one before it. */
function chain(values) {
  const left = new Set(data.rows.keys());
  const found = [0];
  left.delete(0);
  while (left.size) {
    const last = found[found.length - 1];
    let [best, most] = [left.values().next().value, -Infinity];
    for (const row of left) {
      const value = alike(values, last, row);
      if (value > most) [best, most] = [row, value];
    }
    found.push(best);
    left.delete(best);
  }
  return found;
}

function drawLikeness(values) {
  const width = $("likeness").clientWidth;
  const order = [state.run, likeness.order, width, dark.matches].join();
  if (order !== likeness.drawn) {
    likeness.rows = { layer: () => [...data.rows.keys()], label: byLabel, likeness: () => chain(values) }[likeness.order]();
    likeness.drawn = order;
    const count = likeness.rows.length;
    const z = likenessGrid(values);
    const every = Math.ceil((count * 17) / (Math.min(width, 760) - 96));
    const ticks = likeness.rows.map((row, place) => [place, headName(data.rows[row])]).filter((_, place) => place % every === 0);
    const side = Math.min(width, 760);
    const margin = { l: 44, r: 52, t: 6, b: 44 };
    picture("likeness", {
      says: { title: "Similarity of all pairs of heads", scale: "1 means equal maps." },
      width: side, height: side - margin.l - margin.r + margin.t + margin.b, margin, frames: likenessFrame(),
      grid: { z, low: 0, high: 1, stops: VIRIDIS }, ramp: roundTicks(0, 1),
      x: { range: [-0.5, count - 0.5], ticks, turned: 90 }, y: { range: [count - 0.5, -0.5], ticks },
      click: ({ row }) => choose(likeness.rows[row]),
      hover: (event, { column, row: line }) => {
        const [a, b] = [data.rows[likeness.rows[line]], data.rows[likeness.rows[column]]];
        if (!a || !b) return;
        const value = z[line][column];
        const shown = Number.isNaN(value) ? "–" : value.toFixed(2);
        showTip(event, [[headName(a), null, allLabels(a)], [headName(b), null, allLabels(b)], ["similarity", null, shown]]);
      },
    });
  } else reframe("likeness", likenessFrame());
  $("likeness-what").replaceChildren("1 means equal maps. ", ...subscripts(data.provenance.similarity ?? ""));
  $("likeness").setAttribute("aria-label",
    `Similarity of all pairs of ${counted(data.rows.length, "head")}; the list beside it has the heads most similar to ${headName(chosen())}`);
}

function likenessFrame() {
  const place = likeness.rows.indexOf(state.row);
  return [{ x0: -0.5, x1: likeness.rows.length - 0.5, y0: place - 0.5, y1: place + 0.5, plain: true, width: 1.5 }];
}

function drawAlike(values) {
  const found = [...data.rows.keys()].filter((row) => row !== state.row).map((row) => [row, alike(values, state.row, row)])
    .filter(([, value]) => !Number.isNaN(value))
    .sort((a, b) => b[1] - a[1]).slice(0, 10);
  $("alike-title").textContent = `Most similar to ${headName(chosen())}`;
  $("alike").replaceChildren(...found.map(([row, value]) => headLine(data.rows[row], value.toFixed(2), row)));
}

/** A list item for a head: value, name, labels. */
export function headLine(row, value, index) {
  return el("li", {}, el("b", {}, value), headButton(row, () => choose(index)), el("small", {}, allLabels(row)));
}
