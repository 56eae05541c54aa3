// The results, and how figures, tokens and heads are written.
"use strict";

const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const coarse = matchMedia("(pointer: coarse)");

const properties = new Map();  // of the style sheet, as they have been read
dark.addEventListener("change", () => properties.clear());

/** A custom property of the style sheet, such as `--ink`. */
function css(name) {
  if (!properties.has(name)) properties.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return properties.get(name);
}

/** An element with attributes and children; strings become text, never markup. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// --- the data ----------------------------------------------------------------------------------

/** The bytes in a text of gzip within base64. */
async function unpack(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  for (let index = 0; index < packed.length; index++) packed[index] = letters.charCodeAt(index);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const unpackText = async (id) => new TextDecoder().decode(await unpack($(id).textContent));

/** The number that the code of a float of 2 bytes stands for. */
function half(code) {
  const [sign, power, rest] = [code & 0x8000 ? -1 : 1, (code >> 10) & 31, code & 1023];
  if (power === 31) return rest ? NaN : sign * Infinity;
  return sign * (power ? (1 + rest / 1024) * 2 ** (power - 15) : rest * 2 ** -24);
}

const HALVES = [];  // of every code, once one is asked for
const word = new DataView(new ArrayBuffer(4));

/** What the code of a float of so many bytes stands for. */
function float(code, planes) {
  if (planes === 2) {
    if (!HALVES.length) for (let each = 0; each < 65536; each++) HALVES.push(half(each));
    return HALVES[code];
  }
  word.setUint32(0, code);
  return word.getFloat32(0);
}

/** The numbers of a grid (see headwise.report.codec), unpacked once: `{ shape, values }`, NaN for none. */
function numbers(grid) {
  grid.unpacked ??= unpack(grid.data).then((bytes) => {
    const count = bytes.length / grid.planes;
    const one = count / grid.shape[0];
    const values = new Float32Array(count);
    for (let index = 0; index < count; index++) {
      let code = 0;
      for (let plane = 0; plane < grid.planes; plane++) code = code * 256 + bytes[plane * count + index];
      if (grid.unit !== undefined) values[index] = float(code, grid.planes) * grid.unit;
      else if (grid.levels === undefined) values[index] = code - 1;
      else if (code > grid.levels) values[index] = NaN;
      else {
        const share = code / grid.levels;
        values[index] = grid.scale[Math.floor(index / one)] * (grid.root ? share * share : share);
      }
    }
    return { shape: grid.shape, values };
  });
  return grid.unpacked;
}

/** The part of a grid that is one head's: a flat array. */
async function ofHead(grid, head) {
  const { shape, values } = await numbers(grid);
  const size = values.length / shape[0];
  return values.subarray(head * size, (head + 1) * size);
}

/** How `count` tokens lie in `cells` blocks: token i in cell floor(i·cells/count), as `Map` cuts them. */
function blocks(count, cells) {
  const start = (cell) => Math.ceil((cell * count) / cells);
  return {
    count, cells, exact: count === cells, start,
    cell: (token) => Math.floor((token * cells) / count),
    size: (cell) => start(cell + 1) - start(cell),
  };
}

const NONE = "unlabeled";
const TEXTS = ["text", "image", "encoder", "decoder"];  // other streams are places that a layer numbers anew
let runs = [];  // one look, or the two that are compared
let data;       // the look that is shown

/** Adds to a look what all views need: rows by place, each row's layer, label names, the layers' lengths, streams read. */
function prepare(look) {
  look.column = new Map(look.columns.map((column) => [column.key, column]));
  for (const column of look.columns) {
    const most = Math.max(...known(look.rows, column.key).map(Math.abs), 1e-4);
    column.digits = column.unit === "share" ? 2 : Math.max(0, 2 - Math.floor(Math.log10(most)));
  }
  look.places = new Map(look.rows.map((row, index) => [`${row.layer}.${row.head}`, index]));
  look.byName = new Map(look.rows.map((row, index) => [`${row.module}.${row.head}`, index]));
  look.width = Math.max(...look.rows.map(({ head }) => head + 1));
  for (const stream of look.repeats) stream.apart = true;  // random tokens are no text: each stands by itself
  for (const stream of look.streams) stream.positions = !TEXTS.includes(stream.name);
  look.read = look.streams.filter((_, index) => look.layers.some(({ queries, keys }) => queries === index || keys === index));
  for (const layer of look.layers) {
    [layer.from, layer.to] = [look.streams[layer.queries], look.streams[layer.keys]];
    const [, n, m] = layer.maps.shape;
    layer.rows = blocks(layer.from.tokens.length, n);
    layer.cols = blocks(layer.to.tokens.length, m);
    if (layer.repeat) layer.twin = twin(layer, look);
    // What it reads, said only where a model has more than one kind of layer.
    layer.reads = look.read.length === 1 ? "" : layer.kind === "cross" ? "cross" : layer.from.name;
  }
  const labels = new Set(look.rules.map(({ label }) => label));
  for (const row of look.rows) {
    row.of = look.layers[row.layer];
    for (const { label } of row.labels) labels.add(label);
  }
  look.labels = [...labels, NONE];
  return look;
}

/** The layer as it is on random repeats: another text, and whole maps alone. */
function twin(layer, look) {
  const [from, to] = [look.repeats[layer.queries], look.repeats[layer.keys]];
  const axis = blocks(from.tokens.length, from.tokens.length);
  const most = layer.visible && Math.max(...layer.visible);  // of a window
  const visible = most && from.tokens.map((_, query) => Math.min(most, layer.causal ? query + 1 : axis.count));
  return { ...layer, from, to, rows: axis, cols: axis, maps: layer.repeat, top_keys: null, received: null, visible, isTwin: true };
}

const firstLabel = (row) => row.labels[0]?.label ?? NONE;
const allLabels = (row) => (row.labels.length ? row.labels.map(({ label }) => label).join(", ") : NONE);
const headName = (row) => `Layer ${row.layer}, head ${row.head}`;
const headShort = (row) => `${row.layer}.${row.head}`;

/** The values of a figure that are there. */
const known = (rows, key) => rows.map((row) => row[key]).filter((value) => typeof value === "number");

// --- how it is written -------------------------------------------------------------------------

/** A figure as people read it, with as many digits as the largest of its column makes useful. */
function figure(value, column) {
  if (typeof value !== "number") return "–";
  return value.toFixed(column?.digits ?? 2).replace("-", "−");
}

const unitName = (column) => (["nats", "tokens"].includes(column?.unit) ? ` ${column.unit}` : "");
const weight = (value) => (value > 0 && value < 0.0005 ? "<0.001" : value.toFixed(3));
const percent = (value) => `${Math.round(value * 100)}\u202f%`;
const whole = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");
const counted = (value, word) => `${whole(value)} ${word}${value === 1 ? "" : "s"}`;

/** Text whose `_{…}` are subscripts. */
const subscripts = (text) => text.split(/_\{([^}]*)\}/).map((part, index) => (index % 2 ? el("sub", {}, part) : part));
const formula = (text) => el("span", { class: "formula" }, ...subscripts(text));

/** A token with its spaces, line ends and unprintable characters made visible. */
function visible(token) {
  const plain = { "\n": "↵", " ": "·", "\t": "⇥", "\r": "␍" };
  return token.replace(/[\n\t\r ]|[\p{C}\p{Z}]/gu, (mark) => plain[mark] ?? `\\u{${mark.codePointAt(0).toString(16)}}`) || "∅";
}

/** Text of `most` letters at most. */
const shortened = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);

/** What a token is called: its letters in the text, or where it has none, what the tokenizer calls it. */
function tokenName(stream, index) {
  const piece = stream.apart ? stream.tokens[index].trim() : stream.pieces?.[index];
  return visible(piece ? piece.trim() || piece : stream.tokens[index]);
}

/** A cell of an axis in words: the token, or the first and the last of its block. */
function cellLabel(stream, axis, cell) {
  const [first, end] = [axis.start(cell), axis.start(cell + 1)];
  const name = tokenName(stream, first);
  return end - first === 1 ? name : `${name} … ${tokenName(stream, end - 1)}`;
}

function cellPlace(axis, cell) {
  const [first, end] = [axis.start(cell), axis.start(cell + 1)];
  return end - first === 1 ? `${first}` : `${first}–${end - 1}`;
}

/** How far a key is from its query, in words: of patches, in rows and columns. */
function distance(layer, query, key) {
  if (layer.kind === "cross") return "";
  if (layer.from.grid) return patchDistance(layer.from, query, key);
  return query === key ? "itself" : query > key ? `${query - key} back` : `${key - query} ahead`;
}

/** How many tokens of an image come before its patches. */
const beforePatches = ({ tokens, grid: [rows, columns] }) => tokens.length - rows * columns;

function patchDistance(stream, query, key) {
  if (query === key) return "itself";
  const [from, to] = [query, key].map((index) => index - beforePatches(stream));
  if (Math.min(from, to) < 0) return "";
  const columns = stream.grid[1];
  const [down, right] = [Math.floor(to / columns) - Math.floor(from / columns), (to % columns) - (from % columns)];
  const part = (by, word, one, other) => (by ? [`${counted(Math.abs(by), word)} ${by > 0 ? one : other}`] : []);
  return [...part(down, "row", "down", "up"), ...part(right, "column", "right", "left")].join(", ");
}

const tokenCode = (stream, index) => el("code", { class: "token" }, tokenName(stream, index));

/** A group of switches, one of which is on. `options` are [value, text, long name]. */
function switches(box, name, options, value, change) {
  const legend = box.querySelector("legend");
  const held = box.contains(document.activeElement);
  box.replaceChildren(...(legend ? [legend] : []), ...options.map((option) => {
    if (typeof option === "string") return el("i", {}, option);
    const [key, text, title] = option;
    const input = el("input", { type: "radio", name, value: key, ...(title ? { "aria-label": title } : {}) });
    input.checked = key === value;
    input.addEventListener("change", () => change(key));
    return el("label", title ? { title } : {}, input, el("span", {}, text));
  }));
  if (held) box.querySelector("input:checked")?.focus();
}
