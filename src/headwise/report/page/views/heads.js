// The map of heads, layer by head, with one figure or the labels; and the chosen head at a glance.

views.heads = {
  title: "Heads",
  load: () => headMap(chosen()),
  draw(map) {
    drawStatistics();
    drawHeads();
    drawGlance(map);
  },
};

function drawStatistics() {
  const random = (column) => column.key.endsWith("_random");
  const chips = (columns) => columns.map(({ key, short, title }) => [key, short, title]);
  const repeats = data.columns.filter(random);
  switches($("statistics"), "statistic", [
    ["label", "label", "Label"], ...chips(data.columns.filter((column) => !random(column))),
    ...(repeats.length ? ["on random repeats:", ...chips(repeats)] : []),
  ], state.statistic, (key) => { state.statistic = key; drawHeads(); });
}

/** Layers by heads, with `cell(row)` in each; null where a layer has no such head. */
function headsGrid(cell, look = data) {
  const grid = look.layers.map(() => Array(look.width).fill(null));
  for (const row of look.rows) grid[row.layer][row.head] = cell(row) ?? null;
  return grid;
}

/** The colours of the labels as a scale from the first to the last. */
const labelScale = () => data.labels.flatMap((name, index) =>
  [index, index + 1].map((edge) => [edge / data.labels.length, labelColour(name)]));

function headsTrace() {
  const column = data.column.get(state.statistic);
  const out = (row) => state.only && !hasLabel(row, state.only);
  const shared = { type: "heatmap", xgap: 2, ygap: 2, hoverinfo: "none", hoverongaps: false };
  if (column) {
    const bar = colourBar({ nticks: 5 });
    return { ...shared, ...colours(column, known(data.rows, column.key)), colorbar: bar, z: headsGrid((row) => (out(row) ? null : row[column.key])) };
  }
  const z = headsGrid((row) => (out(row) ? null : data.labels.indexOf(firstLabel(row))));
  return { ...shared, z, zmin: -0.5, zmax: data.labels.length - 0.5, colorscale: labelScale(), showscale: false };
}

/** What is written in the cells, so many pixels wide, of the heads drawn. */
function headsWords({ z, zmin, zmax, colorscale }, across) {
  const column = data.column.get(state.statistic);
  const rows = data.rows.filter(({ layer, head }) => z[layer][head] !== null);
  const ink = ({ layer, head }) => {
    const share = (z[layer][head] - zmin) / (zmax - zmin);
    return colorscale === "Viridis" ? inkOn(share > 0.55 ? "#ffffff" : "#000000") : css(Math.abs(share - 0.5) > 0.4 ? "--panel" : "--ink");
  };
  return {
    type: "scatter", mode: "text", hoverinfo: "skip", x: rows.map(({ head }) => head), y: rows.map(({ layer }) => layer),
    text: rows.map((row) => harmless(column ? figure(row[column.key], column) : brief(row, across))),
    textfont: { size: column ? 12 : 11, color: rows.map((row) => (column ? ink(row) : inkOn(labelColour(firstLabel(row))))) },
  };
}

/** A head's label for a cell so many pixels wide. */
function brief(row, across) {
  const name = firstLabel(row);
  if (name === NONE) return "–";
  return across < 96 ? data.rules.find((rule) => rule.label === name)?.brief ?? name : name;
}

const hasLabel = (row, name) => (name === NONE ? row.labels.length === 0 : row.labels.some(({ label }) => label === name));

/** The room beside a map of heads for the names of layers and, with `bar`, the colour bar. */
const headsMargin = (bar, look = data) => ({ l: namesRoom(look), r: bar ? 58 : 14, t: 8, b: 44 });

/** Axes of layers by heads, in a box so many pixels wide; the frame is round `row`. */
function headsLayout(width, margin, row, look = data) {
  const count = look.layers.length;
  const step = Math.max(1, Math.ceil(count / 26));
  const ticks = look.layers.map((_, index) => index).filter((index) => index % step === 0);
  const every = Math.max(1, Math.ceil((26 * look.width) / (width - margin.l - margin.r)));
  return plotLayout({
    width, height: Math.max(12, Math.min(72, 430 / count)) * count + margin.t + margin.b, margin,
    shapes: row ? frame(row.head, row.layer) : [],
    xaxis: { title: { text: "head" }, range: [-0.5, look.width - 0.5], dtick: every, tick0: 0 },
    yaxis: {
      title: { text: layersTitle(look) }, range: [count - 0.5, -0.5], tickvals: ticks,
      ticktext: ticks.map((index) => layerName(index, look)),
    },
  });
}

function drawHeads() {
  const column = data.column.get(state.statistic);
  const width = $("heads").clientWidth;
  const margin = headsMargin(column);
  const across = (width - margin.l - margin.r) / data.width;
  const trace = headsTrace();
  const traces = across < 34 ? [trace] : [trace, headsWords(trace, across)];
  const box = plot("heads", traces, headsLayout(width, margin, chosen()), {
    click: ({ points: [{ x, y }] }) => choose(rowAt(y, x)),
    hover: ({ event, points: [{ x, y }] }) => {
      const row = data.rows[rowAt(y, x)];
      if (row) showTip(event, headTip(row, data.column.get(state.statistic)));
    },
  });
  const title = column?.title ?? "Label";
  box.setAttribute("aria-label",
    `Map of heads: ${title}, ${counted(data.layers.length, "layer")}; chosen: ${headName(chosen())}. The table has all figures`);
  $("what").replaceChildren(el("b", {}, `${title}. `),
    column?.meaning ?? "What a head does, by rules (see About). The first label that fits colours a head; it can have more.");
  drawLegend();
}

/** The labels with their colours and how many heads have them; one can be singled out. */
function drawLegend() {
  $("legend").replaceChildren(...data.labels.flatMap((name) => {
    const count = data.rows.filter((row) => hasLabel(row, name)).length;
    const coloured = data.rows.filter((row) => firstLabel(row) === name).length;
    if (!count) return [];
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = labelColour(name);
    const button = el("button", { type: "button", "aria-pressed": String(state.only === name) }, swatch, `${name} `, el("b", {}, whole(count)),
      coloured < count ? el("small", {}, ` (${whole(count - coloured)} as a further label)`) : "");
    button.addEventListener("click", () => {
      const place = [...$("legend").querySelectorAll("button")].indexOf(button);
      state.only = state.only === name ? "" : name;
      drawHeads();
      $("legend").querySelectorAll("button")[place].focus();
    });
    return [el("li", {}, button)];
  }));
}

function drawGlance(map) {
  const row = chosen();
  $("glance-title").textContent = headName(row);
  $("glance-module").textContent = row.module;
  $("glance-labels").replaceChildren(...labelLines(row));
  $("glance-open").setAttribute("href", address("head"));
  $("glance-text").setAttribute("href", address("text"));
  $("glance-text").textContent = `On the ${views.text.title.toLowerCase()}`;
  drawMap("glance", row, map, { small: true });
}

/** Each label of a head, with what gave it. */
function labelLines(row) {
  if (!row.labels.length) return [el("li", {}, el("b", {}, NONE), ": no rule holds")];
  return row.labels.map(({ label, key, score, threshold, coverage, sign = "≥" }) => {
    const mark = el("i", { class: "swatch" });
    mark.style.background = labelColour(label);
    const column = data.column.get(key);
    const why = `: ${(column?.title ?? key).toLowerCase()} ${figure(score, column)} ${sign} ${figure(threshold, column)}`;
    const share = typeof coverage === "number" && coverage < 0.995 ? ` on ${percent(coverage)} of the queries` : "";
    return el("li", {}, mark, el("b", {}, label), why + share);
  });
}

function connectHeads() {
  $("heads").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    const { layer, head } = chosen();
    const next = data.layers[layer + move[0]];
    if (next) choose(rowAt(layer + move[0], Math.min(head + move[1], next.maps.shape[0] - (move[0] ? 1 : 0))));
  });
}
