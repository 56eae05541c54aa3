// A scatter plot of any metric of the heads against any other; initially, induction against previous token.

import { roundTicks } from "../shared/chart.js";
import { $, el } from "../shared/dom.js";
import { showTip } from "../shared/tip.js";
import { counted, unitName } from "../shared/words.js";
import { choose, remember } from "./choice.js";
import { glyph, headTip, labelColor, pointGlyph } from "./labels.js";
import { headLine } from "./likeness.js";
import { data, firstLabel, hasLabel, known } from "./look.js";
import { picture } from "./save.js";
import { state } from "./state.js";
import { figure } from "./words.js";

const axes = { x: "", y: "" };

export const scatterView = {
  title: "Scatter",
  kept: {
    x: [() => axes.x, (value) => { if (data.column.has(value)) axes.x = value; }],
    y: [() => axes.y, (value) => { if (data.column.has(value)) axes.y = value; }],
  },
  there: () => data.columns.length > 1,
  more: true,
  draw() {
    const there = shownFigures();
    if (!there.includes(axes.x) || !there.includes(axes.y)) startAxes();
    for (const name of ["x", "y"]) {
      $(`axis-${name}`).replaceChildren(...there.map((key) => el("option", { value: key }, data.column.get(key).title)));
      $(`axis-${name}`).value = axes[name];
    }
    drawScatter();
  },
};

const shownFigures = () => data.columns.map(({ key }) => key).filter((key) => known(data.rows, key).length);

/** Returns true if a metric differs enough between heads to be worth plotting. */
function varies(key) {
  const values = known(data.rows, key);
  return Math.max(...values) - Math.min(...values) > 0.1 * (data.column.get(key).unit === "share" ? 1 : Math.max(...values.map(Math.abs)));
}

/** Sets the axes to induction against previous token if these vary, else to the first two metrics that vary. */
export function startAxes() {
  const varied = shownFigures().filter(varies);
  const there = varied.length > 1 ? varied : shownFigures();
  const first = (keys, other) => keys.find((key) => there.includes(key)) ?? other;
  axes.y = first(["induction_random", "induction"], there[1]);
  axes.x = first(["previous_random", "previous"], there[0]);
  if (axes.x === axes.y) [axes.x, axes.y] = there;
}

/** Ranks from 0; equal values get the mean of their ranks. */
function ranks(values) {
  const order = [...values.keys()].sort((a, b) => values[a] - values[b]);
  const found = Array(values.length);
  for (let from = 0; from < order.length;) {
    let to = from;
    while (to + 1 < order.length && values[order[to + 1]] === values[order[from]]) to++;
    for (let place = from; place <= to; place++) found[order[place]] = (from + to) / 2;
    from = to + 1;
  }
  return found;
}

/** Spearman's rank correlation; NaN if one of the two is constant. */
function rankCorrelation(x, y) {
  const [a, b] = [ranks(x), ranks(y)];
  const mean = (a.length - 1) / 2;
  let [both, left, right] = [0, 0, 0];
  a.forEach((rank, index) => {
    both += (rank - mean) * (b[index] - mean);
    left += (rank - mean) ** 2;
    right += (b[index] - mean) ** 2;
  });
  return both / Math.sqrt(left * right);
}

/** The standard error of a head's metric; 0 if there is none. */
const errorOf = (row, key) => row[`${key}_se`] || 0;

/** The range of the values, extended to 0 if that is near, with a margin at both ends. */
function roomy(values) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low > 0 && low < 0.6 * high) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low - room, high + room];
}

function drawScatter() {
  const [x, y] = [data.column.get(axes.x), data.column.get(axes.y)];
  const places = [...data.rows.keys()].filter((row) => [x, y].every(({ key }) => typeof data.rows[row][key] === "number"));
  const rows = places.map((place) => data.rows[place]);
  const [across, up] = [x, y].map(({ key }) => rows.map((row) => row[key]));
  const width = $("scatter").clientWidth;
  const axis = (column, values) => {
    const range = roomy(values);
    return { title: column.title + (unitName(column) && `,${unitName(column)}`), range, ticks: roundTicks(...range, 6), lines: true };
  };
  picture("scatter", {
    says: { title: `${y.title} against ${x.title.toLowerCase()}, every head`, labels: data.labels.filter((name) => rows.some((row) => firstLabel(row) === name)) },
    width, height: Math.min(560, Math.max(320, width * 0.62)), margin: { l: 62, r: 16, t: 10, b: 42 }, x: axis(x, across), y: axis(y, up),
    points: places.map((place, index) => ({
      x: across[index], y: up[index], row: place, size: place === state.row ? 18 : 11, edge: place === state.row ? 2.2 : 0.7,
      color: labelColor(firstLabel(rows[index])), path: pointGlyph(firstLabel(rows[index])),
      faint: Boolean(state.only && !hasLabel(rows[index], state.only)), error: [errorOf(rows[index], x.key), errorOf(rows[index], y.key)],
    })),
    click: ({ point }) => choose(point.row),
    hover: (event, { point }) => {
      const row = data.rows[point.row];
      const line = (key) => [data.column.get(key).title, null, figure(row[key], data.column.get(key))];
      showTip(event, [...headTip(row), line(axes.x), line(axes.y)]);
    },
  });
  const agreement = rankCorrelation(across, up);
  const said = Number.isNaN(agreement) ? "no rank correlation: one of the metrics is constant" : `rank correlation ${figure(agreement)} (Spearman)`;
  $("scatter-what").textContent = `${counted(rows.length, "head")}, ${said}.`;
  $("scatter").setAttribute("aria-label", `${y.title} against ${x.title}: ${counted(rows.length, "head")}, ${said}. The table has all metrics`);
  drawLabelLegend("scatter-legend", rows);
  const order = [...places].sort((a, b) => data.rows[b][y.key] - data.rows[a][y.key]).slice(0, 10);
  $("highest-title").textContent = `Highest: ${y.title.toLowerCase()}`;
  $("highest").replaceChildren(...order.map((place) => headLine(data.rows[place], figure(data.rows[place][y.key], y), place)));
}

/** Draws the legend for the colors and glyphs of some heads. */
export function drawLabelLegend(id, rows) {
  $(id).replaceChildren(...data.labels.filter((name) => rows.some((row) => firstLabel(row) === name)).map((name) => {
    return el("li", {}, glyph(name, pointGlyph(name)), name);
  }));
}

export function connectScatter() {
  for (const name of ["x", "y"]) {
    $(`axis-${name}`).addEventListener("change", () => { axes[name] = $(`axis-${name}`).value; remember(); drawScatter(); });
  }
}
