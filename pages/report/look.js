// The looks that the page shows, with the data that all views need.

export const NONE = "unlabeled";
const TEXTS = ["text", "image", "encoder", "decoder"];  // other streams are positions that a layer numbers itself
/** @type {Look[]} */
export let runs = [];  // one look, or the two that are compared
/** @type {Look} */
export let data;       // the look that is shown

/** Sets the looks of the page to `found`. */
export function setRuns(found) {
  runs = found.map(prepare);
  data = runs[0];
}

/** Selects look `run` as the one that is shown. */
export function showData(run) {
  data = runs[run];
}

/**
 * The division of `count` tokens into `cells` blocks: token i is in cell floor(i·cells/count), as in Python's `Map`.
 * @param {number} count
 * @param {number} cells
 * @returns {Axis}
 */
export function blocks(count, cells) {
  const start = (cell) => Math.ceil((cell * count) / cells);
  return {
    count, cells, exact: count === cells, start,
    cell: (token) => Math.floor((token * cells) / count),
    size: (cell) => start(cell + 1) - start(cell),
  };
}

/**
 * Adds the data that all views need to a look: rows by place, each row's layer, label names, layer axes, and the streams read.
 * @param {Look} look
 */
function prepare(look) {
  look.column = new Map(look.columns.map((column) => [column.key, column]));
  for (const column of look.columns) {
    const most = Math.max(...known(look.rows, column.key).map(Math.abs), 1e-4);
    column.digits = column.unit === "share" ? 2 : Math.max(0, 2 - Math.floor(Math.log10(most)));
  }
  look.places = new Map(look.rows.map((row, index) => [`${row.layer}.${row.head}`, index]));
  look.byName = new Map(look.rows.map((row, index) => [`${row.module}.${row.head}`, index]));
  look.width = Math.max(...look.rows.map(({ head }) => head + 1));
  for (const stream of look.repeats) stream.apart = true;  // random tokens are not a text: each is shown separately
  for (const stream of look.streams) stream.positions = !TEXTS.includes(stream.name);
  look.read = look.streams.filter((_, index) => look.layers.some(({ queries, keys }) => queries === index || keys === index));
  for (const layer of look.layers) {
    [layer.from, layer.to] = [look.streams[layer.queries], look.streams[layer.keys]];
    const [, n, m] = layer.maps.shape;
    layer.rows = blocks(layer.from.tokens.length, n);
    layer.cols = blocks(layer.to.tokens.length, m);
    if (layer.repeat) layer.twin = twin(layer, look);
    // The input that the layer reads, stated only if the model has more than one kind of layer.
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

/**
 * The layer on repeated random tokens: it has other tokens and only whole maps.
 * @param {Layer} layer
 * @param {Look} look
 * @returns {Layer}
 */
function twin(layer, look) {
  const [from, to] = [look.repeats[layer.queries], look.repeats[layer.keys]];
  const axis = blocks(from.tokens.length, from.tokens.length);
  const most = layer.visible && Math.max(...layer.visible);  // the size of a window
  const visible = most && from.tokens.map((_, query) => Math.min(most, layer.causal ? query + 1 : axis.count));
  return { ...layer, from, to, rows: axis, cols: axis, maps: layer.repeat, top_keys: null, received: null, visible, isTwin: true };
}

/** @param {Row} row */
export const firstLabel = (row) => row.labels[0]?.label ?? NONE;
/** @param {Row} row */
export const allLabels = (row) => (row.labels.length ? row.labels.map(({ label }) => label).join(", ") : NONE);

/**
 * The known values of a metric.
 * @param {Row[]} rows
 * @param {string} key
 */
export const known = (rows, key) => rows.map((row) => row[key]).filter((value) => typeof value === "number");
/**
 * @param {Row} row
 * @param {string} name
 */
export const hasLabel = (row, name) => (name === NONE ? row.labels.length === 0 : row.labels.some(({ label }) => label === name));
