// All heads' maps in one picture.

const CELLS = 1_100_000;  // the most cells of the mosaic

views.mosaic = {
  title: "Mosaic",
  load: () => Promise.all(data.layers.map((layer) => numbers(layer.maps))),
  draw(maps) {
    switches($("mosaic-orders"), "mosaic-order", [["layer", "by layer and head"], ["label", "by label"]], mosaic.order, (order) => {
      mosaic.order = order;
      redraw();
    });
    drawMosaic(maps);
  },
};

const mosaic = { order: "layer", places: [], columns: 0, lines: 0, square: 0, side: 0, step: 0, drawn: "" };

/** The rows in the order of their first labels. */
const byLabel = () => data.rows.map((_, index) => index).sort((a, b) =>
  data.labels.indexOf(firstLabel(data.rows[a])) - data.labels.indexOf(firstLabel(data.rows[b])) || a - b);

/** Where each row's tile lies: a grid of layers by heads, or lines filled one after another. */
function mosaicPlaces() {
  if (mosaic.order === "layer") return data.rows.map(({ layer, head }) => [layer, head]);
  const columns = Math.max(data.width, Math.ceil(Math.sqrt(data.rows.length)));
  const places = [];
  byLabel().forEach((row, place) => { places[row] = [Math.floor(place / columns), place % columns]; });
  return places;
}

/** A head's map as `side` by `side` cells: the largest weight of those that fall into one. */
function tile(layer, map, side) {
  const [n, m] = [layer.rows.cells, layer.cols.cells];
  const found = Array.from({ length: side }, () => new Float32Array(side).fill(NaN));
  const [down, across] = [Math.max(n, side), Math.max(m, side)];
  for (let i = 0; i < down; i++) {
    const [line, query] = [found[Math.floor((i * side) / down)], Math.floor((i * n) / down)];
    for (let j = 0; j < across; j++) {
      const [place, key] = [Math.floor((j * side) / across), Math.floor((j * m) / across)];
      const value = Math.sqrt(map[query * m + key]);
      if (!ahead(layer, query, key) && !(line[place] >= value)) line[place] = value;
    }
  }
  return found;
}

/** Lays the tiles out in a box so many pixels wide: places, how many cells a tile has, and its size in pixels. */
function layTiles(room) {
  mosaic.places = mosaicPlaces();
  mosaic.columns = 1 + Math.max(...mosaic.places.map(([, column]) => column));
  mosaic.lines = 1 + Math.max(...mosaic.places.map(([line]) => line));
  mosaic.square = Math.min(room / mosaic.columns, 220);
  const sides = [...new Set(data.layers.flatMap(({ rows, cols }) => [rows.cells, cols.cells]))];
  const most = Math.min(1.5 * mosaic.square, Math.sqrt(CELLS / (mosaic.columns * mosaic.lines)) - 1);
  // Cells of a tile are those of its map where all maps have as many; else they are small, and maps of any size fit.
  mosaic.side = Math.max(6, Math.floor(Math.min(most, sides.length === 1 ? sides[0] : 4 * Math.max(...sides))));
  mosaic.step = mosaic.side + Math.max(1, Math.round(mosaic.side / 24));
}

/** All tiles as one grid of cells. */
function mosaicCells(maps) {
  const { step, side } = mosaic;
  const z = Array.from({ length: mosaic.lines * step }, () => new Float32Array(mosaic.columns * step).fill(NaN));
  data.rows.forEach((row, index) => {
    const { shape, values } = maps[row.layer];
    const size = shape[1] * shape[2];
    const [line, column] = mosaic.places[index];
    tile(row.of, values.subarray(row.head * size, (row.head + 1) * size), side)
      .forEach((cells, i) => z[line * step + i].set(cells, column * step));
  });
  return z;
}

/** Ticks in the middle of tiles, as many as can be read; none where tiles are not in order of layers and heads. */
function tileAxis(count, title, name = String) {
  if (mosaic.order !== "layer") return { tickvals: [] };
  const every = Math.max(1, Math.ceil(20 / mosaic.square));
  const numbers = Array.from({ length: Math.ceil(count / every) }, (_, index) => index * every);
  const middle = (number) => number * mosaic.step + mosaic.side / 2 - 0.5;
  return { title: { text: title }, tickvals: numbers.map(middle), ticktext: numbers.map((number) => name(number)) };
}

function drawMosaic(maps) {
  drawMosaicTitle();
  const width = $("mosaic").clientWidth;
  const order = [state.run, mosaic.order, width, dark.matches].join();
  if (order === mosaic.drawn) { Plotly.relayout($("mosaic"), { shapes: tileShape() }); return; }
  mosaic.drawn = order;
  const margin = { l: namesRoom(), r: 8, t: 8, b: 40 };
  layTiles(width - margin.l - margin.r);
  const { square, columns, lines, step } = mosaic;
  plot("mosaic", [{
    type: "heatmap", z: mosaicCells(maps), zmin: 0, zmax: 1, colorscale: "Viridis", showscale: false, hoverinfo: "none", hoverongaps: true,
    zsmooth: lines * columns * step * step > 300_000 ? "fast" : false,
  }], plotLayout({
    width: square * columns + margin.l + margin.r, height: square * lines + margin.t + margin.b, margin, shapes: tileShape(),
    xaxis: { range: [-0.5, columns * step - 0.5], ...tileAxis(columns, "head") },
    yaxis: { range: [lines * step - 0.5, -0.5], ...tileAxis(lines, layersTitle(), layerName) },
  }), {
    click: ({ points: [point] }) => choose(tileAt(point)),
    hover: ({ event, points: [point] }) => {
      const row = data.rows[tileAt(point)];
      if (row) showTip(event, headTip(row));
      else hideTip();
    },
  });
}

/** The row whose tile lies under a point. */
function tileAt({ x, y }) {
  const [line, column] = [Math.floor(y / mosaic.step), Math.floor(x / mosaic.step)];
  return mosaic.places.findIndex(([a, b]) => a === line && b === column);
}

function tileShape() {
  const [line, column] = mosaic.places[state.row];
  const [x, y] = [column * mosaic.step - 1, line * mosaic.step - 1];
  return [{ type: "rect", x0: x, x1: x + mosaic.side + 1, y0: y, y1: y + mosaic.side + 1, line: marked(2.5) }];
}

function drawMosaicTitle() {
  $("mosaic-head").replaceChildren(el("b", {}, headName(chosen())), `: ${allLabels(chosen())}. `, el("a", { href: address("head") }, "Show it"));
  $("mosaic").setAttribute("aria-label", `Maps of all ${counted(data.rows.length, "head")}; chosen: ${headName(chosen())}`);
}
