// Heads by steps: a picture on a canvas, with axes, alarms and the choice drawn over it.

import { $, css, el } from "../shared/dom.js";
import { VIRIDIS, drawn, hex, palette, pixel } from "../shared/draw.js";
import { hideTip, showTip } from "../shared/tip.js";
import { counted, headName, headShort } from "../shared/words.js";
import { TRIANGLE, alarmPaths, alarmText, entry, line, stepAxis, symbol, words } from "./marks.js";
import { DIFFERENCE, chosenColumn, columnAt, data, heads, isShare, reach, runs, shown, shownAlarms, state, statisticOf } from "./run.js";
import { bounds, scaleOf, scaler, shownText, signedScaler, signedText, stepText, unitText, written } from "./scale.js";





const heat = { left: 46, top: 6, bottom: 40, right: 10, picture: null };

/** How figures become colours: `{ share, colours, low, high, log }`. */
function colouring(statistic) {
  if (state.run === DIFFERENCE) return signedColours(shown(statistic.key).values, scaleOf(statistic) === "log");
  const { low, high, least } = bounds(statistic);
  if (low < 0 && high > 0) return signedColours(runs.flatMap((run) => [...run.values.get(statistic.key)]), scaleOf(statistic) === "log");
  if (scaleOf(statistic) === "log") {
    const start = Math.max(least, high * 1e-6);
    return { low: start, high, log: true, share: scaler(start, high, true), stops: VIRIDIS };
  }
  if (low > high) return { low: 0, high: 1, log: false, share: scaler(0, 1, false), stops: VIRIDIS };  // nothing is finite
  const [from, to] = isShare(statistic) ? [0, Math.max(1, high)] : [statistic.unit === "logit" ? low : Math.min(0, low), high];
  return { low: from, high: to, log: false, share: scaler(from, to, false), stops: VIRIDIS };
}

/** Colours on both sides of zero. */
function signedColours(values, log) {
  const sizes = Float32Array.from(values, Math.abs).filter((size) => size > 0 && size < Infinity).sort();
  const [end, one] = [sizes.at(-1) ?? 1, sizes[sizes.length >> 1] ?? 1];
  return { low: -end, high: end, log, share: signedScaler(end, one, log), stops: [css("--low"), css("--panel"), css("--high")] };
}

/** The heads that are shown: from one place to another. */
export function shownHeads() {
  if (state.layer < 0) return [0, heads.length];
  const from = heads.findIndex(({ layer }) => layer === state.layer);
  return [from, from + data.layers[state.layer][1]];
}

/**
 * The columns under each pixel from the left: from one place to another, or none.
 * @param {Steps[]} columns
 * @param {number} wide
 * @param {number[]} reach
 */
function columnsUnder(columns, wide, [low, high]) {
  const each = (high - low) / wide;
  const middles = columns.map(({ middle }) => Math.min(wide - 1, Math.floor((middle - low) / each)));
  const found = Array.from({ length: wide }, () => null);
  columns.forEach(({ from, to }, place) => {
    const end = Math.min(wide, Math.ceil((to - low) / each - 0.5));
    for (let x = Math.max(0, Math.ceil((from - low) / each - 0.5)); x < end; x++) found[x] = [place, place + 1];
  });
  middles.forEach((x, place) => {
    const [from, to] = found[x] ?? [place, place];
    found[x] = middles[from] === x ? [Math.min(from, place), Math.max(to, place + 1)] : [place, place + 1];
  });
  return found;
}

/** One figure for some columns of a head: their mean, or the largest of what is a maximum. */
function together(values, from, to, largest) {
  let [found, count] = [largest ? -Infinity : 0, 0];
  for (let place = from; place < to; place++) {
    const value = values[place];
    if (Number.isNaN(value)) continue;
    count++;
    if (!largest) found += value;
    else if (value > found) found = value;
  }
  return count === 0 ? NaN : largest ? found : found / count;
}

/** Fills the picture, a pixel a column and head. */
function paint(canvas, statistic, { share, stops }) {
  const { columns, values } = shown();
  const [from, to] = shownHeads();
  const under = columnsUnder(columns, canvas.width, reach());
  const [colours, lost] = [palette(stops), pixel(...hex(css("--bad")))];
  const largest = statistic.kind === "maximum" && state.run !== DIFFERENCE;
  const image = new ImageData(canvas.width, to - from);
  const pixels = new Uint32Array(image.data.buffer);
  for (let head = from; head < to; head++) {
    for (let x = 0; x < canvas.width; x++) {
      if (under[x] === null) continue;
      const [first, end] = under[x];
      const start = head * columns.length;
      const value = end - first === 1 ? values[start + first] : together(values, start + first, start + end, largest);
      if (Number.isNaN(value)) continue;
      pixels[(head - from) * canvas.width + x] = value === Infinity ? lost : colours[Math.max(0, Math.min(255, Math.round(share(value) * 255)))];
    }
  }
  canvas.height = to - from;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return Math.max(...under.map((some) => (some ? some[1] - some[0] : 0)));
}

/** Draws the picture and all that lies over it. */
export function drawHeat() {
  const [box, statistic] = [$("heat"), statisticOf()];
  const [from, to] = shownHeads();
  const wide = box.clientWidth - heat.left - heat.right;
  const tall = Math.max(1, Math.min(26, Math.round(430 / (to - from))));
  const canvas = el("canvas", { "aria-hidden": "true" });
  canvas.width = Math.max(1, Math.round(wide * devicePixelRatio));
  const colour = colouring(statistic);
  const most = paint(canvas, statistic, colour);
  canvas.style.cssText = `left:${heat.left}px;top:${heat.top}px;width:${wide}px;height:${tall * (to - from)}px;image-rendering:pixelated`;
  Object.assign(heat, { wide, tall, from, to, axis: reach() });
  const svg = drawn("svg", { height: heat.top + tall * (to - from) + heat.bottom, role: "presentation" },
    ...headAxis(), ...stepAxis(heat.left, heat.top + tall * (to - from), wide, heat.axis));
  svg.append(drawn("g", { id: "heat-choice" }), drawn("g", { id: "heat-marks" }, ...alarmPaths(heatAlarms())));
  box.replaceChildren(canvas, svg);
  box.setAttribute("aria-label", `${statistic.title} of ${counted(to - from, "head")} over steps; the table of figures has those of the chosen head`);
  $("pooled").textContent = most > 1 ? `Here up to ${most} columns share a pixel: ${statistic.kind === "maximum" && state.run !== DIFFERENCE ? "the largest" : "their mean"} is shown.` : "";
  drawRamp(colour);
  drawChoice();
}

const stepX = (step) => heat.left + ((step - heat.axis[0]) / (heat.axis[1] - heat.axis[0] || 1)) * heat.wide;
const headY = (head) => heat.top + (head - heat.from + 0.5) * heat.tall;

/** The names of heads, or of layers where heads are too thin for one each. */
function headAxis() {
  const marks = [];
  if (heat.tall >= 12) {
    for (let head = heat.from; head < heat.to; head++) marks.push(words(heat.left - 6, headY(head) + 4, "end", headShort(heads[head])));
    return marks;
  }
  let [shownAt, previous] = [-Infinity, -1];
  for (let head = heat.from; head < heat.to; head++) {
    if (heads[head].layer === previous) continue;
    previous = heads[head].layer;
    const edge = headY(head) - heat.tall / 2;
    marks.push(line(heat.left - 4, edge, heat.left, edge, "grid"));
    const middle = edge + (data.layers[previous][1] * heat.tall) / 2;
    if (middle - shownAt >= 13) marks.push(words(heat.left - 6, (shownAt = middle) + 4, "end", String(previous)));
  }
  const height = heat.tall * (heat.to - heat.from);
  const turned = words(0, 0, "middle", "layer");
  turned.setAttribute("transform", `translate(12 ${heat.top + height / 2}) rotate(-90)`);
  return [...marks, turned];
}

function heatAlarms() {
  return shownAlarms().filter(({ head }) => head >= heat.from && head < heat.to)
    .map((alarm) => ({ alarm, at: [stepX(alarm.step), headY(alarm.head)] }));
}

/** The frame round the chosen head, and the line at the chosen step. */
export function drawChoice() {
  const group = $("heat-choice");
  if (!group) return;
  const { columns } = shown();
  const x = stepX(columns[chosenColumn(columns)].middle);
  const bottom = heat.top + heat.tall * (heat.to - heat.from);
  group.replaceChildren(line(x, heat.top, x, bottom, "now"));
  if (state.head < heat.from || state.head >= heat.to) return;
  const height = Math.max(heat.tall, 4);
  for (const [colour, width] of [["--panel", 4.5], ["--ink", 2]]) {
    group.append(drawn("rect", {
      x: heat.left - 1, width: heat.wide + 2, y: headY(state.head) - height / 2, height, fill: "none", stroke: css(colour), "stroke-width": width,
    }));
  }
}

/** The legend of the picture: what its colours stand for. */
function drawRamp({ low, high, log, stops }) {
  const ramp = el("i", { class: "ramp" });
  ramp.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const swatch = (name) => {
    const mark = el("i", { class: "swatch" });
    mark.style.background = css(name);
    return mark;
  };
  const { values } = shown();
  const text = state.run === DIFFERENCE ? signedText : written;
  const lowest = state.run !== DIFFERENCE && bounds(statisticOf()).low < low ? `≤ ${text(low)}` : text(low);
  const alarms = shownAlarms();
  const own = alarms.some(({ statistic }) => statistic === state.statistic);
  const other = alarms.some(({ statistic }) => statistic !== state.statistic);
  $("legend").replaceChildren(...[
    entry(el("span", {}, lowest), ramp, text(high), log ? el("small", {}, "\u00a0(logarithm)") : ""),
    values.some(Number.isNaN) && entry(swatch("--soft"), "no figure"),
    values.some((value) => value === Infinity) && entry(swatch("--bad"), "not finite"),
    own && entry(symbol("alarm", TRIANGLE), "alarm"),
    other && entry(symbol("alarm other", TRIANGLE), "alarm of another statistic"),
  ].filter(Boolean));
}

/** The head and the column under the pointer; null outside. */
function under(event) {
  const box = $("heat").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left - heat.left, event.clientY - box.top - heat.top];
  const head = heat.from + Math.floor(y / heat.tall);
  if (x < 0 || x > heat.wide || head < heat.from || head >= heat.to || y < 0) return null;
  const step = heat.axis[0] + (x / heat.wide) * (heat.axis[1] - heat.axis[0]);
  const column = columnAt(shown().columns, step);
  return column < 0 ? null : { head, column };
}

/** What a tip says of a head at a column. */
export function cellTip(head, column) {
  const [{ columns, values }, statistic] = [shown(), statisticOf()];
  const { first, last } = columns[column];
  const lines = [[headName(heads[head]), null, ""], [stepText(columns[column]), null, ""]];
  lines.push([statistic.title, null, shownText(values[head * columns.length + column]) + unitText(statistic)]);
  const alarms = shownAlarms().filter((alarm) => alarm.head === head && alarm.step >= first && alarm.step <= last);
  return [...lines, ...alarms.map((alarm) => ["Alarm:", null, alarmText(alarm)])];
}

/** Connects the picture and the keys; `choose` is called with a head and a column. */
export function connectHeat(choose) {
  const box = $("heat");
  box.addEventListener("pointermove", (event) => {
    const at = under(event);
    if (at) showTip(event, cellTip(at.head, at.column)); else hideTip();
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("click", (event) => {
    const at = under(event);
    if (at) choose(at.head, at.column);
  });
  for (const id of ["heat", "curve"]) $(id).addEventListener("keydown", (event) => keyed(event, choose));
}

/** Goes from head to head, layer to layer and step to step. */
function keyed(event, choose) {
  const { columns } = shown();
  const [column, { layer }] = [chosenColumn(columns), heads[state.head]];
  const next = (where) => heads.findIndex((head) => head.layer === layer + where);
  const [head, to] = {
    ArrowUp: [state.head - 1, column], ArrowDown: [state.head + 1, column],
    ArrowLeft: [state.head, column - 1], ArrowRight: [state.head, column + 1],
    PageUp: [next(-1), column], PageDown: [next(1), column],
    Home: [state.head, 0], End: [state.head, columns.length - 1],
  }[event.key] ?? [];
  if (head === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  if (heads[head] && columns[to]) choose(head, to);
}
