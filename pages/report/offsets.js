// Attention distance: the fraction of the weight at each distance; for patches, by rows and columns.

import { roundTicks, turnedRoom } from "../shared/chart.js";
import { $ } from "../shared/dom.js";
import { VIRIDIS } from "../shared/draw.js";
import { hideTip, showTip } from "../shared/tip.js";
import { percent, weight } from "../shared/words.js";
import { data } from "./look.js";
import { picture } from "./save.js";
import { chosen } from "./state.js";
import { tokenWeights, topKeys } from "./weights.js";
import { beforePatches } from "./words.js";

/** The names of the distance bins, such as `4–7`, or `−7…−4` for keys ahead of the query. */
function binNames(starts) {
  const name = (distance) => `${distance}`.replace("-", "−");
  return starts.map((first, index) => {
    const next = starts[index + 1];
    if (next === undefined) return `${first}+`;
    return next - first === 1 ? name(first) : `${name(first)}${first < 0 ? "…" : "–"}${name(next - 1)}`;
  });
}

/** Draws the attention distance of the chosen head, from its `rows`. */
export function drawOffsets(rows) {
  const { offsets } = rows;
  const layer = chosen().of;
  $("offsets-panel").hidden = !offsets && !layer.from.grid;
  if (layer.from.grid) return drawPatchOffsets(rows);
  if (!offsets) return undefined;
  // From the farthest key ahead that this layer can attend to, to the farthest key back.
  const first = data.offsets.findIndex((_, bin) => (data.offsets[bin + 1] ?? Infinity) > (layer.causal ? 0 : 1 - layer.cols.count));
  const end = data.offsets.filter((start) => start < layer.rows.count).length;
  const names = binNames(data.offsets).slice(first, end);
  const shares = [...offsets.slice(first, end)];
  const most = Math.max(...shares, 1e-9);
  picture("offsets", {
    width: $("offsets").clientWidth, height: 180 + turnedRoom(names, 40), margin: { l: 54, r: 10, t: 8, b: turnedRoom(names, 40) }, bars: shares.map((share, bin) => [bin, share]),
    x: {
      title: data.offsets[first] < 0 ? "tokens back (negative: ahead)" : "tokens back",
      range: [-0.6, shares.length - 0.4], ticks: names.map((name, bin) => [bin, name]), turned: 40,
    },
    y: { title: "share", range: [0, most * 1.05], ticks: roundTicks(0, most * 1.05), lines: true },
    hover: (event, { column }) => (names[column] ? showTip(event, [["tokens back", null, names[column]], ["share", null, shares[column].toFixed(3)]]) : hideTip()),
  });
  const rest = 1 - shares.reduce((sum, share) => sum + share, 0);
  const forward = data.offsets[0] < 0 || layer.causal ? "" : "ahead of the query, or ";
  $("offsets-what").textContent = rest > 0.02 ? `${percent(rest)} of the weight is elsewhere: ${forward}on a sink.` : "The shares sum to 1.";
  return $("offsets").setAttribute("aria-label",
    `Weight by distance: ${names.map((name, index) => `${name} back ${shares[index].toFixed(2)}`).join(", ")}`);
}

/**
 * For an image's patches, the fraction of the weight at each row and column offset, from −(n − 1) to n − 1 in both.
 * @param {HeadRows} rows
 */
function patchOffsets({ layer, ...rest }) {
  const [rows, columns] = layer.from.grid;
  const first = beforePatches(layer.from);
  const z = Array.from({ length: 2 * rows - 1 }, () => new Float32Array(2 * columns - 1));
  for (let query = 0; query < rows * columns; query++) {
    const weights = layer.rows.exact && layer.cols.exact ? [...tokenWeights({ layer, ...rest }, first + query, "to").entries()]
      : topKeys({ layer, ...rest }, first + query);
    for (const [key, value] of weights) {
      const at = key - first;
      if (at < 0) continue;
      const [down, right] = [Math.floor(at / columns) - Math.floor(query / columns), (at % columns) - (query % columns)];
      z[down + rows - 1][right + columns - 1] += value / (rows * columns);
    }
  }
  return z;
}

function drawPatchOffsets(shown) {
  const z = patchOffsets(shown);
  const [rows, columns] = shown.layer.from.grid;
  const signs = (count) => roundTicks(1 - count, count - 1, 5).filter(([by]) => Number.isInteger(by))
    .map(([by]) => [by + count - 1, by ? `${by > 0 ? "+" : "−"}${Math.abs(by)}` : "0"]);
  const top = Math.max(...z.map((line) => Math.max(...line)), 1e-9);
  const margin = { l: 44, r: 44, t: 8, b: 40 };
  const width = $("offsets").clientWidth;
  const side = Math.min((width - margin.l - margin.r) / (2 * columns - 1), 240 / (2 * rows - 1));
  picture("offsets", {
    width: side * (2 * columns - 1) + margin.l + margin.r, height: side * (2 * rows - 1) + margin.t + margin.b, margin,
    grid: { z: z.map((line) => line.map((share) => Math.sqrt(share / top))), low: 0, high: 1, stops: VIRIDIS },
    ramp: [0, 0.1, 0.5, 1].map((share) => [Math.sqrt(share), (share * top).toPrecision(2)]),
    x: { title: "columns to the right", range: [-0.5, 2 * columns - 1.5], ticks: signs(columns) },
    y: { title: "rows down", range: [2 * rows - 1.5, -0.5], ticks: signs(rows) },
    hover: (event, { column, row }) => {
      if (z[row]?.[column] === undefined) return hideTip();
      return showTip(event, [["rows down", null, `${row - rows + 1}`], ["columns right", null, `${column - columns + 1}`],
        ["share", null, weight(z[row][column])]]);
    },
  }).setAttribute("aria-label", "Share of the weight by rows and columns from the query");
  const rest = 1 - z.reduce((sum, line) => sum + line.reduce((one, share) => one + share, 0), 0);
  const exact = shown.layer.rows.exact && shown.layer.cols.exact;
  $("offsets-what").textContent = `0, 0 is the patch itself. ${exact ? "" : "Only the strongest keys are stored and shown. "}`
    + `${percent(Math.max(0, rest))} of the weight is elsewhere${beforePatches(shown.layer.from) ? ", such as on tokens that are not patches" : ""}.`;
}
