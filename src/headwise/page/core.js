// The data, how figures and tokens are written, and what the other scripts share.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const columns = new Map(data.columns.map((column) => [column.key, column]));
const state = { statistic: "", row: 0, token: 0, scale: "root", direction: "to" };
const dark = matchMedia("(prefers-color-scheme: dark)");
const coarse = matchMedia("(pointer: coarse)");

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** An element with attributes and children; strings become text, never markup. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The bytes packed (gzip, base64) in the script element `id`. */
async function unpack(id) {
  const text = atob($(id).textContent);
  const packed = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const layers = new Map();

/** A head's map as rows of weights (queries) of columns (keys); null where the mask hides the key. */
async function headMap(layer, head) {
  if (!layers.has(layer)) layers.set(layer, unpack(`map-${layer}`));
  const bytes = await layers.get(layer);
  const [n, low] = [data.side, bytes.length / 2];
  return Array.from({ length: n }, (_, query) => {
    const start = (head * n + query) * n;
    return Array.from({ length: n }, (_, key) =>
      key > query ? null : (bytes[start + key] * 256 + bytes[low + start + key]) / data.levels);
  });
}

/** A figure as people read it. */
function figure(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return value.toFixed(2);
  return Math.abs(value) < 9.995 ? value.toFixed(2) : value.toFixed(1);
}

const unitName = { share: "", nats: " nats", tokens: " tokens", logit: "" };
const weight = (value) => (value > 0 && value < 0.0005 ? "<0.001" : value.toFixed(3));
const percent = (value) => `${Math.round(value * 100)}\u202f%`;
const headName = (row) => `Layer ${row.layer}, head ${row.head}`;
const whole = (value) => value.toLocaleString("en-GB");

/** A formula, whose `_{…}` are subscripts. */
function formula(text) {
  const parts = text.split(/_\{([^}]*)\}/);
  return el("span", { class: "formula" }, ...parts.map((part, index) => (index % 2 ? el("sub", {}, part) : part)));
}

/** The coverage of a column when it is the same for every head, as it is where masks are alike. */
function sharedCoverage(key) {
  const all = data.rows.map((row) => row[`${key}_coverage`]);
  return columns.has(key) && typeof all[0] === "number" && all.every((value) => value === all[0]) ? all[0] : null;
}

/** A token with its spaces, line ends and unprintable characters made visible. */
function visible(token) {
  const plain = { "\n": "↵", " ": "·", "\t": "⇥", "\r": "␍" };
  return token.replace(/[\n\t\r ]|[\p{C}\p{Z}]/gu, (mark) =>
    plain[mark] ?? `\\u{${mark.codePointAt(0).toString(16)}}`);
}

/** The same for Plotly's labels, which read a little HTML. */
function label(token, most) {
  const text = visible(token);
  const short = [...text].length > most ? [...text].slice(0, most - 1).join("") + "…" : text;
  return short.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// Cells are blocks of tokens as `Map` cuts them: token i lies in cell floor(i·n/T), sizes differ by one at most.
const perCell = data.tokens.length / data.side;
const cellOf = (token) => Math.floor((token * data.side) / data.tokens.length);
const cellStart = (cell) => Math.ceil((cell * data.tokens.length) / data.side);
/** The first token of a cell and the one after its last. */
const tokensOf = (cell) => [cellStart(cell), cellStart(cell + 1)];

/** A cell of the map in words: the token, or the first and the last of its block. */
function cellLabel(cell, write = visible) {
  const [first, end] = tokensOf(cell);
  const name = write(data.tokens[first]);
  return end - first === 1 ? name : `${name} … ${write(data.tokens[end - 1])}`;
}

function cellPlace(cell) {
  const [first, end] = tokensOf(cell);
  return end - first === 1 ? `${first}` : `${first}–${end - 1}`;
}

/** Shows lines of [name, code or null, tail] beside the pointer. */
function showTip(event, lines) {
  const tip = $("tip");
  tip.replaceChildren(...lines.map(([name, code, tail]) => {
    const line = el("div", {}, `${name} `);
    if (code !== null) line.append(el("code", {}, code), " ");
    line.append(el("b", {}, tail));
    return line;
  }));
  tip.hidden = false;
  const point = event.touches?.[0] ?? event;
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const left = point.clientX + 16 + width > innerWidth ? point.clientX - width - 16 : point.clientX + 16;
  const top = point.clientY + 16 + height > innerHeight ? point.clientY - height - 12 : point.clientY + 16;
  tip.style.left = `${Math.max(6, left)}px`;
  tip.style.top = `${Math.max(6, top)}px`;
}

const hideTip = () => { $("tip").hidden = true; };

/** What both plots have in common. */
function plotLayout(extra) {
  const axis = {
    fixedrange: true, zeroline: false, showgrid: false, ticks: "", linecolor: css("--line"),
    tickfont: { size: 12, color: css("--muted") }, title: { font: { size: 12, color: css("--muted") }, standoff: 8 },
  };
  const merged = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: false,
    font: { family: getComputedStyle(document.body).fontFamily, color: css("--ink"), size: 12 }, ...extra,
  };
  for (const name of ["xaxis", "yaxis"]) {
    merged[name] = { ...axis, ...extra[name], title: { ...axis.title, ...extra[name].title } };
  }
  return merged;
}

const plotOptions = { displayModeBar: false, responsive: false, doubleClick: false, showTips: false };
const colourBar = (extra) => ({
  thickness: 10, outlinewidth: 0, len: 1, lenmode: "fraction", x: 1.01, xpad: 4, ypad: 0,
  tickfont: { size: 11, color: css("--muted") }, ticks: "", ticklabeloverflow: "allow", ...extra,
});
