// The ladder's page: time and memory rung by rung, and the table, for the size that is chosen.

const ladder = JSON.parse($("data").textContent);
let size = ladder.sizes[0];
const savedName = () => size.name;  // of saved pictures
const embedded = true;          // the page has no links to what it shows

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

const MARKS = {  // of a series: its colour, and its glyph in a box of 12 by 12
  forward: ["--accent", "M6 .8a5.2 5.2 0 1 1 0 10.4a5.2 5.2 0 1 1 0-10.4z"],
  "forward and backward": ["--mark", "M6 .3l5.7 5.7-5.7 5.7-5.7-5.7z"],
  memory: ["--accent", "M6 .8a5.2 5.2 0 1 1 0 10.4a5.2 5.2 0 1 1 0-10.4z"],
};

/** One figure, rung by rung from the top: a point each, for a bar would have no foot on a logarithmic scale. */
function series(name, figure, unit) {
  return size.rows.map((row, place) => ({ row, place, name, unit, spread: figure(row) })).filter(({ spread }) => spread);
}

/** Ticks of a logarithmic scale, at round numbers. */
function logTicks(low, high, room) {
  const range = high / low;
  const steps = range > 30 ? [1] : range > 6 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  const ticks = Array.from({ length: 24 }, (_, power) => steps.map((step) => step * 10 ** (power - 9))).flat();
  return ticks.filter((tick) => tick >= low / 10 ** room && tick <= high * 10 ** room)
    .map((tick) => [Math.log10(tick), tick.toLocaleString("en-GB", { maximumFractionDigits: 9 })]);
}

/** Points on a row for each rung; `names` writes the rungs at the left. */
function drawRungs(id, title, found, names) {
  const all = found.flatMap(({ spread: { low, high } }) => [low, high]);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const longest = Math.max(...size.rows.map(({ rung }) => rung.length));
  const room = 0.04 * Math.log10(high / low) + 0.03;
  chart(id, {
    width: $(id).clientWidth, height: 60 + 26 * size.rows.length, margin: { l: names ? 14 + 6.6 * longest : 12, r: 20, t: 8, b: 44 },
    x: { title, range: [Math.log10(low) - room, Math.log10(high) + room], ticks: logTicks(low, high, room), lines: true },
    y: { range: [size.rows.length - 0.5, -0.5], ticks: size.rows.map(({ rung }, place) => [place, names ? rung : ""]), lines: true },
    lines: found.map(({ place, name, spread }) => (
      { points: [[Math.log10(spread.low), place], [Math.log10(spread.high), place]], colour: MARKS[name][0], width: 2 })),
    points: found.map(({ row, place, name, unit, spread }) => ({
      x: Math.log10(spread.median), y: place, size: 10, edge: 0, colour: css(MARKS[name][0]), path: MARKS[name][1], row, name, unit, spread,
    })),
    hover: (event, { point: { row, name, unit, spread } }) => showTip(event, [[row.rung, null, ""], [name, null, `${brief(spread.median)} ${unit}`]]),
  }).setAttribute("aria-label", `${title} of ${size.rows.length} rungs; the table has the figures`);
}

function drawPlots() {
  const scaled = (spread) => spread && { median: 1e3 * spread.median, low: 1e3 * spread.low, high: 1e3 * spread.high };
  const kib = (value) => value && { median: value / 1024, low: value / 1024, high: value / 1024 };
  const times = [...series("forward", (row) => scaled(row.forward), "ms"), ...series("forward and backward", (row) => scaled(row.step), "ms")];
  drawRungs("times", "milliseconds", times, true);
  const beside = $("times").getBoundingClientRect().top === $("memory").getBoundingClientRect().top;
  drawRungs("memory", "KiB that forward and backward add", series("memory", (row) => kib(row.peak_bytes), "KiB"), !beside);
  $("series").replaceChildren(...["forward", "forward and backward"].filter((name) => times.some((point) => point.name === name)).map((name) => {
    const glyph = drawn("svg", { viewBox: "0 0 12 12", class: "glyph", "aria-hidden": "true" }, drawn("path", { d: MARKS[name][1], fill: css(MARKS[name][0]) }));
    return el("li", {}, glyph, name);
  }));
}

function draw() {
  const [batch, length, width, heads] = size.name.split("x");
  $("what").textContent = `Batch ${batch}, length ${length}, width ${width}, ${heads} heads.`;
  drawPlots();
  drawTable();
}

function drawOnce() {
  $("where").textContent = ladder.where;
  $("sizes").append(...ladder.sizes.map((one, index) => {
    const input = el("input", { type: "radio", name: "size", value: one.name });
    input.checked = index === 0;
    input.addEventListener("change", () => { size = one; draw(); });
    return el("label", {}, input, el("span", {}, one.name.replaceAll("x", " × ")));
  }));
  $("made").append(...ladder.made.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function start() {
  drawOnce();
  draw();
  dark.addEventListener("change", draw);
  addEventListener("resize", draw);
  document.documentElement.dataset.ready = "yes";
}

try {
  start();
} catch (error) {
  $("fault").hidden = false;
  $("fault").textContent = `The page could not be drawn: ${error.message}`;
  console.error(error);
}
