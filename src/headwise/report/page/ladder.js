// The ladder's page: time and memory rung by rung, and the table, for the size that is chosen.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let size = data.sizes[0];

/** An element with attributes and children; strings become text, never markup. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const whole = (value) => value.toLocaleString("en-GB");
const milliseconds = (spread) => 1e3 * spread.median;
const brief = (value) => (value >= 100 ? whole(Math.round(value)) : value.toPrecision(3));
const scientific = (value) => (value === 0 ? "0" : value.toExponential(1));

/** The figures of a row: title, text, and the name that its ratio goes by. */
const FIGURES = [
  ["off by", (row) => scientific(row.difference), null],
  ["parameters", (row) => whole(row.parameters), "parameters"],
  ["multiply-adds", (row) => (row.multiply_adds === null ? "–" : whole(row.multiply_adds)), "multiply_adds"],
  ["memory, KiB", (row) => (row.peak_bytes === null ? "–" : brief(row.peak_bytes / 1024)), "peak_bytes"],
  ["forward, ms", (row) => (row.forward === null ? "–" : brief(milliseconds(row.forward))), "forward"],
  ["and backward, ms", (row) => (row.step === null ? "–" : brief(milliseconds(row.step))), "step"],
];

/** A ratio to the rung before, with quartiles where it varies. */
function ratio(row, figure) {
  const found = row.over_before?.[figure];
  if (found === undefined) return null;
  if (typeof found === "number") return { text: `×${found.toFixed(2)}`, title: "" };
  return {
    text: `×${found.median.toFixed(2)}`,
    title: `quartiles ${found.low.toFixed(2)} to ${found.high.toFixed(2)}`,
  };
}

function drawTable() {
  $("table").tHead.rows[0].replaceChildren(el("th", { scope: "col", class: "words" }, "rung"),
    ...FIGURES.map(([title]) => el("th", { scope: "col" }, title)));
  $("table").tBodies[0].replaceChildren(...size.rows.map((row) => el("tr", {},
    el("td", { class: "words", title: row.where }, row.rung),
    ...FIGURES.map(([, text, figure]) => {
      const beside = figure === null ? null : ratio(row, figure);
      return el("td", {}, text(row), ...(beside === null ? [] : [el("small", { title: beside.title }, beside.text)]));
    }))));
  $("notes").replaceChildren(...size.notes.map((note) => el("li", {}, note)));
}

/** Points of one figure, rung by rung from the top: a bar would have no foot on a logarithmic scale. */
function points(name, colour, symbol, figure, unit) {
  const rows = size.rows.filter((row) => figure(row) !== null);
  const all = rows.map(figure);
  return {
    type: "scatter", mode: "markers", name, marker: { color: colour, symbol, size: 10 }, cliponaxis: false,
    y: rows.map((row) => row.rung), x: all.map(({ median }) => median),
    error_x: {
      type: "data", symmetric: false, color: colour, thickness: 2, width: 0,
      array: all.map(({ median, high }) => high - median),
      arrayminus: all.map(({ median, low }) => median - low),
    },
    hovertemplate: `%{y}: %{x:.3g} ${unit}<extra>${name}</extra>`,
  };
}

function layout(title, traces) {
  const font = { size: 12, color: css("--muted") };
  const values = traces.flatMap(({ x }) => x);
  const range = Math.max(...values) / Math.min(...values);
  const steps = range > 30 ? [1] : range > 6 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  const ticks = Array.from({ length: 24 }, (_, power) => steps.map((step) => step * 10 ** (power - 9))).flat();
  return {
    height: 90 + 26 * size.rows.length, margin: { l: 8, r: 12, t: 28, b: 52 }, showlegend: traces.length > 1,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false, hovermode: "closest",
    font: { family: getComputedStyle(document.body).fontFamily, color: css("--ink"), size: 12 },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
    xaxis: {
      type: "log", fixedrange: true, zeroline: false, gridcolor: css("--line"), tickfont: font,
      title: { text: title, font }, tickvals: ticks, ticktext: ticks.map((value) => value.toLocaleString("en-GB", { maximumFractionDigits: 9 })),
    },
    yaxis: {
      categoryorder: "array", categoryarray: size.rows.map((row) => row.rung), range: [size.rows.length - 0.5, -0.5],
      fixedrange: true, automargin: true, ticks: "", tickfont: { size: 12 }, gridcolor: css("--line"),
    },
  };
}

function drawPlots() {
  const options = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false };
  const scaled = (spread) => spread && { median: 1e3 * spread.median, low: 1e3 * spread.low, high: 1e3 * spread.high };
  const kib = (value) => value && { median: value / 1024, low: value / 1024, high: value / 1024 };
  const times = [
    points("forward", css("--accent"), "circle", (row) => scaled(row.forward), "ms"),
    points("forward and backward", css("--mark"), "diamond", (row) => scaled(row.step), "ms"),
  ];
  const memory = [points("memory", css("--accent"), "circle", (row) => kib(row.peak_bytes), "KiB")];
  Plotly.react($("times"), times, layout("milliseconds", times), options);
  Plotly.react($("memory"), memory, layout("KiB that forward and backward add", memory), options);
  $("times").setAttribute("aria-label", `Times of ${size.rows.length} rungs in milliseconds; the table has the figures`);
  $("memory").setAttribute("aria-label", `Memory of ${size.rows.length} rungs in KiB; the table has the figures`);
}

function draw() {
  const [batch, length, width, heads] = size.name.split("x");
  $("what").textContent = `Batch ${batch}, length ${length}, width ${width}, ${heads} heads.`;
  drawPlots();
  drawTable();
}

function drawOnce() {
  $("where").textContent = data.where;
  $("sizes").append(...data.sizes.map((one, index) => {
    const input = el("input", { type: "radio", name: "size", value: one.name });
    input.checked = index === 0;
    input.addEventListener("change", () => { size = one; draw(); });
    return el("label", {}, input, el("span", {}, one.name.replaceAll("x", " × ")));
  }));
  $("made").append(...data.made.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for the page; any of 2023 or later will do");
  drawOnce();
  const packed = Uint8Array.from(atob($("plotly").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = el("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  draw();
  dark.addEventListener("change", draw);
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  $("fault").hidden = false;
  $("fault").textContent = `The page could not be drawn: ${error.message}`;
  console.error(error);
});
