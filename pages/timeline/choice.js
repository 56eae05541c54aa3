// Choosing a head and a step, a statistic or an alarm, and redrawing what depends on it.

import { $, check, el } from "../shared/dom.js";
import { headName, parseHead } from "../shared/words.js";
import { drawCurve } from "./curve.js";
import { drawChoice, drawHeat } from "./heat.js";
import { DIFFERENCE, RUN_NAMES, canDiffer, chosenColumn, data, heads, runs, shown, state, statisticOf } from "./run.js";
import { drawScalars } from "./scalars.js";
import { canLog, scaleOf, shownText, stepText } from "./scale.js";
import { drawFigures, drawHeadAlarms } from "./tables.js";

/** Stores the current choices in the address. */
export function remember() {
  const { columns } = shown();
  const found = new URLSearchParams({ statistic: state.statistic, head: headName(heads[state.head]) });
  if (state.step !== Infinity) found.set("step", String(columns[chosenColumn(columns)].first));
  if (state.layer >= 0) found.set("layer", String(state.layer));
  if (runs.length > 1) found.set("run", state.run === DIFFERENCE ? state.run : RUN_NAMES[state.run]);
  if (state.scale) found.set("scale", state.scale);
  if (state.sort !== "layer") found.set("sort", state.sort);
  if (state.zoom) found.set("steps", state.zoom.map((step) => step.toFixed(1)).join("-"));
  if (data.reread && !$("follow").checked) found.set("follow", "no");
  history.replaceState(history.state, "", `#${found}`);
}

/** Applies an address. Without a known statistic, all of it is ignored; invalid parts are ignored one by one. */
export function follow(hash) {
  const found = new URLSearchParams(hash.slice(1));
  if (!statisticOf(found.get("statistic"))) return;
  Object.assign(state, { statistic: found.get("statistic"), step: Infinity, layer: -1, scale: "", sort: "layer", zoom: null });
  const named = parseHead(found.get("head") ?? "");
  const head = heads.findIndex((one) => one.layer === named?.layer && one.head === named.head);
  if (head >= 0) state.head = head;
  if (/^\d+$/.test(found.get("step") ?? "")) state.step = Number(found.get("step"));
  if (/^\d+$/.test(found.get("layer") ?? "") && data.layers[found.get("layer")]) state.layer = Number(found.get("layer"));
  const run = found.get("run") === DIFFERENCE ? DIFFERENCE : String(RUN_NAMES.indexOf(found.get("run")));
  if (run === DIFFERENCE ? canDiffer() : runs[run]) state.run = run;
  if (["linear", "log", "change"].includes(found.get("scale"))) state.scale = found.get("scale");
  if (["change", "alarm"].includes(found.get("sort"))) state.sort = found.get("sort");
  const steps = (found.get("steps") ?? "").split("-").map(Number);
  if (steps.length === 2 && steps[0] < steps[1]) state.zoom = steps;
  if (found.get("follow") === "no") $("follow").checked = false;
}

/** Zooms to a range of steps, or to all steps without one. */
export function zoom(found) {
  state.zoom = found ? found.xaxis : null;
  drawAll();
}

/** Chooses a head and a column. */
export function choose(head, column) {
  const { columns } = shown();
  state.head = head;
  state.step = column === columns.length - 1 ? Infinity : columns[column].middle;
  if (state.layer >= 0 && heads[head].layer !== state.layer) {
    state.layer = heads[head].layer;
    drawAll();
    return;
  }
  drawChoice();
  drawHead();
  announce();
}

export function showStatistic(key) {
  state.statistic = key;
  drawAll();
}

/** Announces the current choice to screen readers. */
function announce() {
  const [{ columns, values }, statistic] = [shown(), statisticOf()];
  const column = chosenColumn(columns);
  $("said").textContent = `${headName(heads[state.head])}, ${stepText(columns[column])}: ${statistic.title} ${shownText(values[state.head * columns.length + column])}`;
}

/** Draws everything that depends on the chosen head. */
function drawHead() {
  $("bar-head").textContent = headName(heads[state.head]);
  $("head-title").textContent = headName(heads[state.head]);
  $("head-module").textContent = heads[state.head].module || "the model itself";
  drawCurve(choose, zoom);
  drawFigures();
  drawHeadAlarms();
  remember();
}

export function drawAll() {
  if (!$("heat").clientWidth) return;  // the window has no width, so nothing can be drawn
  const statistic = statisticOf();
  const on = { statistic: state.statistic, run: state.run, scale: scaleOf(statistic) };
  for (const [name, value] of Object.entries(on)) check(name, value);
  document.querySelector("#scale input[value=log]").parentElement.hidden = !canLog(statistic);
  $("layer").value = String(state.layer);
  $("what").replaceChildren(el("b", {}, `${statistic.title}${state.run === DIFFERENCE ? ", B − A" : ""}. `), statistic.meaning);
  drawHeat(choose, zoom);
  drawScalars(zoom);
  $("sort").value = state.sort;
  $("whole").hidden = !state.zoom;
  drawHead();
}

/** Shows the head, the step and the statistic of an alarm. */
export function showAlarm({ step, head, statistic, number }) {
  if (statisticOf(statistic)) state.statistic = statistic;
  if (runs.length > 1 && state.run !== String(number)) state.run = String(number);
  if (state.layer >= 0 && heads[head].layer !== state.layer) state.layer = -1;
  [state.head, state.step] = [head, step];
  drawAll();
  announce();
}
