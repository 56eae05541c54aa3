// The loss, the learning rate and other scalars of each step, below the heat map and on its step axis.

import { chart, roundTicks } from "../shared/chart.js";
import { $, el } from "../shared/dom.js";
import { showTip } from "../shared/tip.js";
import { whole } from "../shared/words.js";
import { DIFFERENCE, RUN_NAMES, reach, runs, scalarsOf, state } from "./run.js";
import { written } from "./scale.js";

const HIGH = 64;  // height of each chart in pixels
const COLORS = ["--accent", "--mark"];

/** Draws a small chart for each scalar; `zoom` is called with a range of steps. */
export function drawScalars(zoom) {
  const chosen = state.run === DIFFERENCE ? runs : [runs[state.run]];
  const names = [...new Set(chosen.flatMap((run) => scalarsOf(run).map(([name]) => name)))];
  $("scalars").replaceChildren(...names.map((name, place) => el("div", { class: "chart", id: `scalar-${place}` })));
  names.forEach((name, place) => drawScalar(`scalar-${place}`, name, chosen, zoom));
}

function drawScalar(id, name, chosen, zoom) {
  const [low, high] = reach();
  const margin = { l: 46, r: 10, t: 18, b: 6 };
  const lines = chosen.flatMap((run) => scalarsOf(run).filter(([one]) => one === name).map(([, steps, values]) => ({
    run, points: steps.map((step, place) => [step, values[place] ?? NaN]), color: COLORS[runs.indexOf(run)], width: 1.4,
  })));
  const inside = lines.flatMap(({ points }) => points.filter(([step, value]) => step >= low && step <= high && Number.isFinite(value)).map(([, value]) => value));
  const [least, most] = inside.length ? [Math.min(...inside), Math.max(...inside)] : [0, 1];
  const room = (most - least || Math.abs(most) || 1) * 0.08;
  chart(id, {
    width: $("heat").clientWidth, height: margin.t + HIGH + margin.b, margin, across: true, zoom,
    x: { range: [low, high] },
    y: { range: [least - room, most + room], ticks: roundTicks(least, most, 3), lines: true },
    lines,
    hover: (event, { x }) => showTip(event, lines.map(({ run, points }) => {
      const [step, value] = points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
      return [`${runs.length > 1 ? `${RUN_NAMES[runs.indexOf(run)]}, ` : ""}step ${whole(step)}: ${name.replaceAll("_", " ")}`, null, written(value)];
    })),
  }).setAttribute("aria-label", `${name.replaceAll("_", " ")} over steps`);
  $(id).prepend(el("small", { class: "scalar-name" }, name.replaceAll("_", " ")));
  $(id).setAttribute("role", "img");
}
