// A head's attention map: its weights, how they are drawn, and the rows of single tokens.

/** A head's map, queries by keys in one flat array. */
const headMap = (row) => ofHead(row.of.maps, row.head);

const shade = (value) => (state.scale === "linear" ? value : Math.sqrt(value));

/** Whether all keys of a cell come after all its queries. */
const ahead = (layer, i, j) => layer.causal && layer.cols.start(j) >= layer.rows.start(i + 1);

/** The map as rows for Plotly; null where the mask hides the key. */
function mapRows(layer, map, write = shade) {
  const [n, m] = [layer.rows.cells, layer.cols.cells];
  return Array.from({ length: n }, (_, i) => Array.from({ length: m }, (_, j) => (ahead(layer, i, j) ? null : write(map[i * m + j]))));
}

/** As many ticks as can be read in `room` pixels over the visible range, of `most` letters. */
function tokenTicks(stream, axis, range, room, most) {
  const [low, high] = [Math.max(0, Math.ceil(Math.min(...range))), Math.min(axis.cells - 1, Math.floor(Math.max(...range)))];
  const step = Math.max(1, Math.ceil((high - low + 1) / Math.max(3, room / 15)));
  const cells = [];
  for (let cell = Math.ceil(low / step) * step; cell <= high; cell += step) cells.push(cell);
  return { tickvals: cells, ticktext: cells.map((cell) => label(stream.tokens[axis.start(cell)], most)) };
}

const wholeRanges = (layer) => ({ xaxis: [-0.5, layer.cols.cells - 0.5], yaxis: [layer.rows.cells - 0.5, -0.5] });

/** Weights to mark on a colour bar that ends at `top`. */
function weightMarks(top) {
  const marks = state.scale === "linear" ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
  const shown = top === 1 ? marks : [0, 0.01, 0.1, 0.25, 0.5, 1].map((share) => Number((share * top).toPrecision(1)));
  return { tickvals: shown.map(shade), ticktext: shown.map(String) };
}

/** Draws a head's map in the box `id`, coloured up to `top`. `small` has no ticks; `z` and `scale` replace weights and colours. */
function drawMap(id, row, map, { small = false, top = 1, z, scale, events = {}, shapes = [] } = {}) {
  const layer = row.of;
  const width = $(id).clientWidth;
  const narrow = width < 420;
  const margin = small ? { l: 26, r: 8, t: 4, b: 26 } : { l: narrow ? 62 : 84, r: narrow ? 40 : 48, t: 8, b: narrow ? 74 : 92 };
  const ranges = (!small && state.ranges) || wholeRanges(layer);
  const trace = {
    type: "heatmap", z: z ?? mapRows(layer, map), hoverinfo: small ? "skip" : "none", hoverongaps: false,
    ...(scale ?? { zmin: 0, zmax: shade(top), colorscale: "Viridis" }), showscale: !small, colorbar: colourBar(weightMarks(top)),
  };
  const axis = (name, stream, cells, title) => ({
    range: ranges[name], fixedrange: small || coarse.matches, title: { text: title, ...(small ? { standoff: 2 } : {}) },
    ...(small ? { tickvals: [] } : tokenTicks(stream, cells, ranges[name], width - 130, narrow ? 6 : 10)),
    tickangle: name === "xaxis" ? -60 : 0, tickfont: { family: css("--mono"), size: 11, color: css("--muted") },
  });
  const drawn = width - margin.l - margin.r;
  const tall = Math.max(0.5, Math.min(1.4, layer.rows.count / layer.cols.count));
  return plot(id, [trace], plotLayout({
    width, height: Math.round(drawn * (small ? Math.min(1, tall) : tall)) + margin.t + margin.b, margin, shapes,
    dragmode: small || coarse.matches ? false : "zoom",
    xaxis: axis("xaxis", layer.to, layer.cols, small ? "key" : "key: looked at"),
    yaxis: axis("yaxis", layer.from, layer.rows, small ? "query" : "query: looks"),
  }), events);
}

/** Says what a cell is, beside the pointer. */
function mapTip({ event, points: [{ x, y }] }, row, map) {
  const layer = row.of;
  if (x >= layer.cols.cells || y >= layer.rows.cells) return;
  showTip(event, [
    ["query", cellLabel(layer.from, layer.rows, y), `at ${cellPlace(layer.rows, y)}`],
    ["key", cellLabel(layer.to, layer.cols, x), `at ${cellPlace(layer.cols, x)}`],
    ["weight", null, weight(map[y * layer.cols.cells + x])],
  ]);
}

/** What drawing one head's tokens needs: its map, and the keys that each query attends to most. */
async function headRows(row) {
  const layer = row.of;
  const [map, keys, weights, received] = await Promise.all(
    [layer.maps, layer.top_keys, layer.top_weights, layer.received].map((grid) => ofHead(grid, row.head)));
  return { layer, map, keys, weights, received, kept: layer.top_keys.shape[2] };
}

/** The top keys of a query: `[key, weight]`, exact, the strongest first. */
function topKeys({ keys, weights, kept }, query) {
  const places = Array.from({ length: kept }, (_, rank) => query * kept + rank);
  return places.filter((place) => keys[place] >= 0 && weights[place] > 0).map((place) => [keys[place], weights[place]]);
}

/** The weight of a token on each other: exact on top keys and where cells are tokens, else the mean of its block. */
function tokenWeights(rows, token, direction) {
  const { layer, map, keys, weights, kept } = rows;
  const m = layer.cols.cells;
  if (direction === "to") {
    const found = new Float32Array(layer.to.tokens.length);
    const start = layer.rows.cell(token) * m;
    for (let key = 0; key < found.length; key++) {
      const cell = layer.cols.cell(key);
      found[key] = layer.causal && key > token ? 0 : map[start + cell] / layer.cols.size(cell);
    }
    for (const [key, value] of topKeys(rows, token)) found[key] = value;
    return found;
  }
  const found = new Float32Array(layer.from.tokens.length);
  const column = layer.cols.cell(token);
  for (let query = 0; query < found.length; query++) {
    found[query] = layer.causal && query < token ? 0 : map[layer.rows.cell(query) * m + column] / layer.cols.size(column);
    for (let place = query * kept; place < (query + 1) * kept; place++) if (keys[place] === token) found[query] = weights[place];
  }
  return found;
}

/** The attention that each key received, summed over queries. */
function receivedBy({ layer, received }) {
  const cut = blocks(layer.to.tokens.length, received.length);
  return Float32Array.from(layer.to.tokens, (_, key) => received[cut.cell(key)]);
}
