// Charts: a color grid on a canvas, with axes, bars, lines, points, text and frames drawn over it in SVG.

import { $, css, el } from "./dom.js";
import { between, drawn, hex, palette, pixel } from "./draw.js";
import { hideTip } from "./tip.js";

const FONT = 12;
const STEPS = [1, 2, 5, 10];

/**
 * Draws a chart in the element `id`. The fields of a spec are:
 *   width, height, margin { l, r, t, b }: pixels.
 *   x, y: axes { range, title, ticks, turned, mono, lines, share }. `range` is [left, right] for x, [bottom, top] for y;
 *     ticks are [value, text]; `lines` draws a grid line at each tick; `share(value)` replaces the linear scale.
 *   grid { z, low, high, stops, fill, gap, across, down, lost }: rows of numbers. Cells are centered on integers unless
 *     `across` and `down` give the ranges that they cover; null and NaN stay blank. Colors run through `stops` from `low` to
 *     `high`, or come from `fill(value)`; `lost` is the color of infinite numbers.
 *   bars [[x, y]], lines [{ points, color, width, dash, dots, more }], areas [{ points: [[x, low, high]], color, opacity }],
 *   points [{ x, y, size, color, glyph, edge, faint, error }],
 *   words [{ x, y, text, size, color }], guides (thin dashed lines), frames [{ x0, x1, y0, y1, width, plain }].
 *   ramp [[value, text]]: the ticks of the color bar. over(spec): extra elements, drawn over the marks.
 *   hover(event, place), click(place), zoom(ranges), leave(): a place is { x, y, column, row, point }.
 * @param {string} id
 * @param {ChartSpec} spec
 */
export function chart(id, spec) {
  const box = $(id);
  if (spec.width <= spec.margin.l + spec.margin.r) return box;  // a view that is being hidden has no size
  const first = !box.chart;
  box.chart = spec;
  box.classList.add("chart");
  box.style.height = `${spec.height}px`;
  const { width, height, margin } = spec;
  const area = { x: margin.l, y: margin.t, width: width - margin.l - margin.r, height: height - margin.t - margin.b };
  spec.area = area;
  spec.toX = along(spec.x.range, area.x, area.x + area.width, spec.x.share);
  spec.toY = along(spec.y.range, area.y + area.height, area.y, spec.y.share);
  const marks = drawn("g", { "clip-path": `url(#${id}-clip)` }, ...barMarks(spec), ...guideMarks(spec), ...areaMarks(spec),
    ...lineMarks(spec), ...pointMarks(spec), ...wordMarks(spec), drawn("g", { class: "frames" }, ...frameMarks(spec)));
  const svg = drawn("svg", { width, height, "aria-hidden": "true", "font-family": "system-ui, 'DejaVu Sans', sans-serif", "font-size": FONT },
    drawn("clipPath", { id: `${id}-clip` }, drawn("rect", area)), ...axisMarks(spec), marks, ...(spec.over?.(spec) ?? []), ...rampMarks(spec, id),
    drawn("rect", { ...area, class: "area", fill: "none", "pointer-events": "all" }));
  box.replaceChildren(...(spec.grid ? [gridPicture(spec)] : []), svg);
  if (first) connectChart(box);
  return box;
}

/** @type {(range: number[], from: number, to: number, share?: (value: number) => number) => (value: number) => number} */
const along = ([start, end], from, to, share = (value) => (value - start) / (end - start)) => (value) => from + share(value) * (to - from);

/**
 * Replaces the frames of a chart that has been drawn.
 * @param {string} id
 * @param {Frame[]} frames
 */
export function reframe(id, frames) {
  const { chart: spec } = $(id);
  if (!spec) return;
  spec.frames = frames;
  $(id).querySelector(".frames").replaceChildren(...frameMarks(spec));
}

// --- the grid ----------------------------------------------------------------------------------

/**
 * The cells on a canvas, clipped to the plot area.
 * @param {ChartSpec} spec
 */
function gridPicture(spec) {
  const { grid, area, toX, toY } = spec;
  const [rows, columns] = [grid.z.length, grid.z[0]?.length ?? 0];
  const canvas = el("canvas", { "aria-hidden": "true" });
  const [left, right] = (grid.across ?? [-0.5, columns - 0.5]).map(toX);
  const [top, bottom] = (grid.down ?? [-0.5, rows - 0.5]).map(toY);
  if (grid.gap) paintApart(canvas, grid, right - left, bottom - top);
  else paintCells(canvas, grid, rows, columns);
  const fine = right - left < columns;
  canvas.style.cssText = `left:${left - area.x}px;top:${top - area.y}px;width:${right - left}px;height:${bottom - top}px;`
    + `image-rendering:${fine || grid.gap ? "auto" : "pixelated"}`;
  const cut = el("div", { class: "cut" }, canvas);
  cut.style.cssText = `left:${area.x}px;top:${area.y}px;width:${area.width}px;height:${area.height}px`;
  return cut;
}

const shareOf = ({ low, high }, value) => (high > low ? (value - low) / (high - low) : 0);
const blank = (value) => value === null || Number.isNaN(value);

/** Paints each cell as one pixel. */
export function paintCells(canvas, grid, rows, columns) {
  [canvas.width, canvas.height] = [columns, rows];
  const [colors, lost] = [palette(grid.stops), grid.lost ? pixel(...hex(grid.lost)) : 0];
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const scale = grid.high > grid.low ? 255 / (grid.high - grid.low) : 0;
  grid.z.forEach((line, row) => {
    for (let column = 0; column < columns; column++) {
      const value = line[column];
      if (value === null || value !== value) continue;  // missing, or NaN
      const step = (value - grid.low) * scale + 0.5;
      pixels[row * columns + column] = value === Infinity && lost ? lost : colors[step < 0 ? 0 : step > 255 ? 255 : step | 0];
    }
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
}

const rgb = (parts) => `#${parts.map((part) => part.toString(16).padStart(2, "0")).join("")}`;
export const cellColor = (grid, value) => (grid.fill ? grid.fill(value) : rgb(between(grid.stops.map(hex), shareOf(grid, value))));

/** Paints cells with gaps between them. */
function paintApart(canvas, grid, wide, tall) {
  const [rows, columns] = [grid.z.length, grid.z[0].length];
  [canvas.width, canvas.height] = [Math.round(wide * devicePixelRatio), Math.round(tall * devicePixelRatio)];
  const pen = canvas.getContext("2d");
  const [across, down] = [canvas.width / columns, canvas.height / rows];
  const gap = Math.min(grid.gap * devicePixelRatio, across / 4, down / 4);
  grid.z.forEach((line, row) => line.forEach((value, column) => {
    if (blank(value)) return;
    pen.fillStyle = cellColor(grid, value);
    pen.fillRect(column * across + gap / 2, row * down + gap / 2, across - gap, down - gap);
  }));
}

/**
 * The color bar of the grid, with ticks.
 * @param {ChartSpec} spec
 */
export function rampMarks({ grid, ramp, area, width, margin }, id) {
  if (!ramp) return [];
  const x = width - margin.r + 10;
  const y = along([grid.low, grid.high], area.y + area.height, area.y);
  const stops = grid.stops.map((color, place) => drawn("stop", { offset: place / (grid.stops.length - 1), "stop-color": color }));
  return [
    drawn("linearGradient", { id: `${id}-ramp`, x1: 0, x2: 0, y1: 1, y2: 0 }, ...stops),
    drawn("rect", { x, y: area.y, width: 10, height: area.height, fill: `url(#${id}-ramp)` }),
    ...ramp.map(([value, text]) => lettering(x + 14, y(value) + 4, text, { class: "ramp-tick" })),
  ];
}

// --- axes --------------------------------------------------------------------------------------

export const lettering = (x, y, text, more = {}) => drawn("text", { x, y, fill: css("--muted"), ...more }, text);
const stroke = (x1, y1, x2, y2, color, more = {}) => drawn("line", { x1, y1, x2, y2, stroke: css(color), ...more });

/** @param {ChartSpec} spec */
function axisMarks({ x, y, area, toX, toY, height, margin }) {
  const found = [];
  const font = (axis) => (axis.mono ? { "font-family": css("--mono"), "font-size": FONT } : {});
  for (const [value, text] of x.ticks ?? []) {
    const at = toX(value);
    if (x.lines) found.push(stroke(at, area.y, at, area.y + area.height, "--line"));
    const top = area.y + area.height;
    found.push(x.turned
      ? lettering(0, 0, text, { class: "x-tick", "text-anchor": "end", transform: `translate(${at + 4} ${top + 10}) rotate(-${x.turned})`, ...font(x) })
      : lettering(at, top + 16, text, { class: "x-tick", "text-anchor": "middle", ...font(x) }));
  }
  for (const [value, text] of y.ticks ?? []) {
    const at = toY(value);
    if (y.lines) found.push(stroke(area.x, at, area.x + area.width, at, "--line"));
    found.push(lettering(area.x - 6, at + 4, text, { class: "y-tick", "text-anchor": "end", ...font(y) }));
  }
  if (x.title) found.push(lettering(area.x + area.width / 2, height - 5, x.title, { class: "x-title", "text-anchor": "middle" }));
  if (y.title) {
    const middle = `translate(${Math.min(13, margin.l - 6)} ${area.y + area.height / 2}) rotate(-90)`;
    found.push(lettering(0, 0, y.title, { class: "y-title", "text-anchor": "middle", transform: middle }));
  }
  return found;
}

/** The height in pixels below an axis for tick labels rotated by `degrees` and, with `title`, for its title. */
export function turnedRoom(texts, degrees, title = true) {
  const [longest, turn] = [Math.max(0, ...texts.map((text) => [...text].length)), (degrees * Math.PI) / 180];
  return Math.ceil(14 + 7.2 * longest * Math.sin(turn) + FONT * Math.cos(turn)) + (title ? 18 : 0);
}

/** About `count` ticks at round numbers from `low` to `high`. */
export function roundTicks(low, high, count = 5) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * STEPS.find((one) => one * power >= rough * 0.999);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
    const value = n * step;
    const text = step < 1e-4 ? Number(value.toPrecision(2)).toExponential()
      : value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    found.push([Number(value.toPrecision(12)), (Math.abs(value) < step / 2 ? "0" : text).replaceAll("-", "−")]);
  }
  return found;
}

// --- marks -------------------------------------------------------------------------------------

/** @param {ChartSpec} spec */
function barMarks({ bars = [], toX, toY }) {
  return bars.map(([x, y]) => {
    const [left, right, top] = [toX(x - 0.38), toX(x + 0.38), toY(y)];
    return drawn("rect", { x: left, width: right - left, y: top, height: Math.max(0, toY(0) - top), fill: css("--accent") });
  });
}

/** @param {ChartSpec} spec */
function lineMarks({ lines = [], toX, toY }) {
  return lines.flatMap(({ points, color, width = 1.6, dash, dots, more = {} }) => {
    let text = "";
    points.forEach(([x, y], place) => {
      if (!blank(y)) text += `${place && !blank(points[place - 1][1]) ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`;
    });
    const drawnLine = drawn("path", { d: text, fill: "none", stroke: css(color), "stroke-width": width, ...(dash ? { "stroke-dasharray": dash } : {}), ...more });
    const ends = dots ? points.filter(([, y]) => !blank(y)) : [];
    return [drawnLine, ...ends.map(([x, y]) => drawn("circle", { cx: toX(x), cy: toY(y), r: 2, fill: css(color) }))];
  });
}

/**
 * Areas between two lines, interrupted where a value is not finite.
 * @param {ChartSpec} spec
 */
function areaMarks({ areas = [], toX, toY }) {
  return areas.flatMap(({ points, color, opacity }) => {
    const parts = [[]];
    for (const point of points) {
      if (point.every(Number.isFinite)) parts.at(-1).push(point);
      else parts.push([]);
    }
    const edge = (part, place) => part.map((point) => `${toX(point[0]).toFixed(1)} ${toY(point[place]).toFixed(1)}`).join("L");
    return parts.filter(({ length }) => length).map((part) => drawn("path", {
      d: `M${edge(part, 2)}L${edge(part.toReversed(), 1)}Z`, fill: css(color), "fill-opacity": opacity,
    }));
  });
}

/**
 * Thin dashed lines where a pattern is expected, visible on any color.
 * @param {ChartSpec} spec
 */
function guideMarks({ guides = [], toX, toY }) {
  return guides.flatMap(([x1, y1, x2, y2]) => [["#ffffff", 1.6, ""], ["#000000", 1.6, "3 4"]].map(([color, width, dash]) => drawn("line", {
    x1: toX(x1), y1: toY(y1), x2: toX(x2), y2: toY(y2), stroke: color, "stroke-width": width, class: "guide",
    "stroke-opacity": 0.85, ...(dash ? { "stroke-dasharray": dash } : {}),
  })));
}

/** @param {ChartSpec} spec */
function pointMarks({ points = [], toX, toY }) {
  return points.map(({ x, y, size = 10, color, path, edge = 0.8, faint, error = [] }) => {
    const [left, top, scale] = [toX(x), toY(y), size / 12];
    const [across, up] = error;
    const bar = (x1, y1, x2, y2) => stroke(x1, y1, x2, y2, "--line-strong");
    return drawn("g", { class: "point", opacity: faint ? 0.12 : 1 },
      ...(across > 0 ? [bar(toX(x - across), top, toX(x + across), top)] : []), ...(up > 0 ? [bar(left, toY(y - up), left, toY(y + up))] : []),
      drawn("path", {
        d: path, fill: color, stroke: css("--ink"), "stroke-width": edge / scale,
        transform: `translate(${left} ${top}) scale(${scale}) translate(-6 -6)`,
      }));
  });
}

/** @param {ChartSpec} spec */
function wordMarks({ words = [], toX, toY }) {
  return words.map(({ x, y, text, size = FONT, color, path }) => {
    const [left, top] = [toX(x), toY(y)];
    const wide = path ? 16 : 0;
    const letters = drawn("text", { x: left + wide / 2, y: top + size * 0.36, "text-anchor": "middle", "font-size": size, fill: color, class: "word" }, text);
    if (!path) return letters;
    const start = text ? left - 8 - text.length * size * 0.29 : left - 6;
    return drawn("g", {}, drawn("path", { d: path, fill: color, transform: `translate(${start} ${top - 6})` }), letters);
  });
}

/**
 * Frames drawn as two lines, so that they are visible on any color; a plain frame is a single line in the mark color.
 * @param {ChartSpec} spec
 */
function frameMarks({ frames = [], toX, toY }) {
  return frames.flatMap(({ x0, x1, y0, y1, width = 2.5, plain }) => {
    const [left, right, top, bottom] = [toX(x0), toX(x1), ...[toY(y0), toY(y1)].sort((a, b) => a - b)];
    // A path, because browsers do not draw a rectangle of zero width.
    const place = { d: `M${left} ${top}H${right}V${bottom}H${left}Z`, fill: "none" };
    const strokes = plain ? [["--mark", width]] : [["--panel", width + 3.5], ["--ink", width]];
    return strokes.map(([color, thick]) => drawn("path", { ...place, stroke: css(color), "stroke-width": thick }));
  });
}

/** A frame around the cell at a column and a row. */
export const frame = (x, y) => [{ x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5 }];

// --- the pointer -------------------------------------------------------------------------------

/**
 * The place under the pointer: null outside the plot area or, in a chart with points, if no point is near.
 * @param {Box} box
 * @param {PointerEvent} event
 * @returns {Place | null}
 */
function placeUnder(box, event) {
  const { area, x, y, toX, toY, points } = box.chart;
  const edge = box.getBoundingClientRect();
  const [left, top] = [event.clientX - edge.left, event.clientY - edge.top];
  if (left < area.x || left > area.x + area.width || top < area.y || top > area.y + area.height) return null;
  const [atX, atY] = [along([area.x, area.x + area.width], x.range[0], x.range[1])(left), along([area.y + area.height, area.y], y.range[0], y.range[1])(top)];
  const place = { x: atX, y: atY, column: Math.round(atX), row: Math.round(atY), left, top };
  if (!points) return place;
  const far = points.map((point) => Math.hypot(toX(point.x) - left, toY(point.y) - top));
  const nearest = far.indexOf(Math.min(...far));
  return far[nearest] <= 14 ? { ...place, point: points[nearest] } : null;
}

/** @param {Box} box */
function connectChart(box) {
  let from = null;  // where a drag began
  const band = drawn("rect", { class: "band" });
  box.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    const place = placeUnder(box, event);
    box.style.cursor = place && box.chart.click ? (box.chart.zoom ? "crosshair" : "pointer") : "";
    if (from && place) {
      for (const [name, value] of Object.entries({
        x: Math.min(from.left, place.left), width: Math.abs(place.left - from.left),
        ...(box.chart.across ? { y: box.chart.area.y, height: box.chart.area.height } : { y: Math.min(from.top, place.top), height: Math.abs(place.top - from.top) }),
      })) band.setAttribute(name, String(value));
    }
    if (place) box.chart.hover?.(event, place);
    else hideTip();
  });
  box.addEventListener("pointerleave", () => { hideTip(); box.chart.leave?.(); });
  box.addEventListener("pointerdown", (event) => {
    if (!box.chart.zoom || event.pointerType === "touch" || event.button !== 0) return;
    from = placeUnder(box, event);
    box.querySelector("svg").append(band);
  });
  box.addEventListener("pointerup", (event) => {
    if (!from) return;
    const [start, end] = [from, placeUnder(box, event)];
    from = null;
    band.remove();
    const [wide, tall] = end ? [Math.abs(end.left - start.left), Math.abs(end.top - start.top)] : [0, 0];
    box.dragged = (box.chart.across ? wide : Math.min(wide, tall)) > 6;
    if (box.dragged) box.chart.zoom({ xaxis: [start.x, end.x].sort((a, b) => a - b), yaxis: [start.y, end.y].sort((a, b) => b - a) });
  });
  box.addEventListener("click", (event) => {
    const place = box.dragged ? null : placeUnder(box, event);
    box.dragged = false;
    if (place) box.chart.click?.(place);
  });
  box.addEventListener("dblclick", () => box.chart.zoom?.(undefined));
}
