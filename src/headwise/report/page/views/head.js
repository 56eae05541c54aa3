// One head: its map, what the chosen query looks at, its figures, offsets, entropy and token pairs.

let headShown;  // the rows of the head that is drawn, for its listeners

views.head = {
  title: "Head",
  async load() {
    const row = chosen();
    const layer = row.of;
    const entropy = await ofHead(layer.entropy, row.head);
    const offsets = layer.offsets && (await ofHead(layer.offsets, row.head));
    return { ...(await headRows(row)), entropy, offsets };
  },
  draw(rows) {
    headShown = rows;
    drawTitle();
    drawWholeMap();
    drawQuery();
    drawReadout();
    drawOffsets();
    drawEntropy();
    drawPairs();
  },
};

function drawTitle() {
  const row = chosen();
  const { layer } = headShown;
  $("head-title").textContent = headName(row);
  const streams = layer.kind === "cross" ? `${layer.from.name} looks at ${layer.to.name}` : layer.reads;
  $("head-module").replaceChildren(el("code", {}, row.module), streams ? ` · ${streams}` : "");
  $("head-labels").replaceChildren(...labelLines(row));
  const [rows, cols] = [layer.rows, layer.cols];
  const size = ({ count, cells }) => [...new Set([Math.floor(count / cells), Math.ceil(count / cells)])].join(" or ");
  const cells = rows.exact && cols.exact ? "Each cell is one query and one key."
    : `Each cell is the weight that a block of ${size(rows)} queries puts on a block of ${size(cols)} keys, on average.`;
  $("head-what").textContent = `${cells} A row sums to 1${layer.causal ? "; keys after the query are out of sight and left blank" : ""}.`;
  $("map-help").textContent = coarse.matches ? "Tap a cell to choose its query; the buttons zoom to it."
    : "Drag to zoom in, click to choose a query; arrow keys move it.";
}

/** The row of the chosen query, framed. */
function queryShape() {
  const { layer } = headShown;
  const query = chosenQuery();
  if (query < 0) return [];
  const cell = layer.rows.cell(query);
  let end = layer.cols.cells;
  while (layer.causal && end > 1 && ahead(layer, cell, end - 1)) end--;
  return [{ type: "rect", x0: -0.5, x1: end - 0.5, y0: cell - 0.5, y1: cell + 0.5, line: marked() }];
}

function drawWholeMap() {
  const { layer, map } = headShown;
  const box = drawMap("map", chosen(), map, {
    top: state.scale === "own" ? Math.max(...map) : 1, shapes: queryShape(),
    events: {
      hover: (point) => mapTip(point, chosen(), headShown.map),
      click: ({ points: [{ y }] }) => chooseToken(headShown.layer.rows.start(y), "to"),
      doubleclick: () => zoom(0),
      relayout: (change) => {
        if (!("xaxis.range[0]" in change || "yaxis.range[0]" in change)) return;
        state.ranges = { xaxis: [...$("map").layout.xaxis.range], yaxis: [...$("map").layout.yaxis.range] };
        drawWholeMap();
      },
    },
  });
  box.setAttribute("aria-label",
    `Attention map of ${headName(chosen())}, ${layer.rows.cells} by ${layer.cols.cells} cells; the list beside it has the chosen query's keys`);
  $("zoom-out").disabled = $("zoom-whole").disabled = state.ranges === undefined;
}

/** Zooms by a factor round the chosen query and the key it looks at most; 0 shows the whole map. */
function zoom(factor) {
  const { layer } = headShown;
  const before = state.ranges ?? wholeRanges(layer);
  const query = Math.max(0, chosenQuery());
  const [key] = topKeys(headShown, query)[0] ?? [0];
  const around = (range, at, cells, flip) => {
    const size = Math.min(cells, Math.max(6, Math.abs(range[1] - range[0]) * factor));
    const low = Math.min(Math.max(-0.5, at - size / 2), cells - 0.5 - size);
    return flip ? [low + size, low] : [low, low + size];
  };
  const ranges = {
    xaxis: around(before.xaxis, layer.cols.cell(key), layer.cols.cells, false),
    yaxis: around(before.yaxis, layer.rows.cell(query), layer.rows.cells, true),
  };
  const all = wholeRanges(layer);
  const whole = factor === 0 || (String(ranges.xaxis) === String(all.xaxis) && String(ranges.yaxis) === String(all.yaxis));
  state.ranges = whole ? undefined : ranges;
  drawWholeMap();
}

/** A list of tokens with the weight of each; `about` marks means of a block. */
function weightList(stream, found, aside, direction, about = () => false) {
  return found.map(([other, value]) => {
    const button = el("button", { type: "button", class: "plain" }, tokenCode(stream, other));
    button.addEventListener("click", () => chooseToken(other, direction));
    return el("li", {}, el("b", {}, `${about(other) ? "≈" : ""}${weight(value)}`), button, el("small", {}, aside(other)));
  });
}

function drawQuery() {
  const { layer, kept } = headShown;
  const query = Math.max(0, chosenQuery());
  $("query-title").replaceChildren("Query ", tokenCode(layer.from, query), ` at ${query} looks at`);
  const found = topKeys(headShown, query);
  const other = layer.kind === "cross" ? "from" : "to";
  $("query-keys").replaceChildren(...weightList(layer.to, found, (key) => `${distance(layer, query, key)} · at ${key}`.replace(/^ · /, ""), other));
  const rest = 1 - found.reduce((sum, [, value]) => sum + value, 0);
  $("query-rest").textContent = kept === 0 ? "Single keys are not kept for a model and a text of this size; the map has blocks of them."
    : rest > 0.0005 ? `${weight(rest)} on all other keys.` : "Nothing on other keys.";
}

function drawReadout() {
  const row = chosen();
  const there = data.columns.filter(({ key }) => typeof row[key] === "number");
  $("readout").replaceChildren(...there.map((column) => {
    const { key, title, unit } = column;
    const [value, coverage, error] = [row[key], row[`${key}_coverage`], row[`${key}_se`]];
    const term = el("dt", {}, title);
    if (typeof coverage === "number" && coverage < 0.995) term.append(" ", el("small", {}, `on ${percent(coverage)}`));
    const shown = el("dd", {}, figure(value, column) + unitName(column));
    if (typeof error === "number") shown.append(" ", el("small", {}, `± ${figure(error, column)}`));
    const bar = el("div", { class: unit === "share" ? "bar" : "bar plain", role: "presentation" });
    if (unit === "share") {
      bar.append(el("i"));
      bar.firstChild.style.width = `${100 * Math.min(1, value)}%`;
    }
    return el("div", {}, term, shown, bar);
  }));
}

const smallMargin = { l: 44, r: 10, t: 6, b: 44 };

/** The bins of distances as `4–7`, or `−7…−4` ahead of the query. */
function binNames(starts) {
  const name = (distance) => `${distance}`.replace("-", "−");
  return starts.map((first, index) => {
    const next = starts[index + 1];
    if (next === undefined) return `${first}+`;
    return next - first === 1 ? name(first) : `${name(first)}${first < 0 ? "…" : "–"}${name(next - 1)}`;
  });
}

function drawOffsets() {
  const { offsets, layer } = headShown;
  $("offsets-panel").hidden = !offsets;
  if (!offsets) return;
  // From the farthest ahead that this layer can see to the farthest back.
  const first = data.offsets.findIndex((_, bin) => (data.offsets[bin + 1] ?? Infinity) > (layer.causal ? 0 : 1 - layer.cols.count));
  const end = data.offsets.filter((start) => start < layer.rows.count).length;
  const title = data.offsets[first] < 0 ? "tokens back; below 0, ahead" : "tokens back";
  const names = binNames(data.offsets).slice(first, end);
  const shares = [...offsets.slice(first, end)];
  plot("offsets", [{ type: "bar", x: names, y: shares, marker: { color: css("--accent") }, hoverinfo: "none" }], plotLayout({
    width: $("offsets").clientWidth, height: 240, margin: { ...smallMargin, b: 64 }, bargap: 0.25,
    xaxis: { type: "category", tickangle: -40, tickfont: muted(11), title: { text: title, standoff: 14 } },
    yaxis: { title: { text: "share" }, rangemode: "tozero", nticks: 5, showgrid: true, gridcolor: css("--line") },
  }), { hover: ({ event, points: [{ x, y }] }) => showTip(event, [["tokens back", null, x], ["share", null, y.toFixed(3)]]) });
  const rest = 1 - shares.reduce((sum, share) => sum + share, 0);
  const forward = data.offsets[0] < 0 || layer.causal ? "" : "ahead of the query, or ";
  $("offsets-what").textContent = rest > 0.02 ? `${percent(rest)} lies elsewhere: ${forward}in a sink.` : "The shares add up to 1.";
  $("offsets").setAttribute("aria-label",
    `Mass by distance: ${names.map((name, index) => `${name} back ${shares[index].toFixed(2)}`).join(", ")}`);
}

function drawEntropy() {
  const { entropy, layer } = headShown;
  const cut = blocks(layer.from.tokens.length, entropy.length);
  const places = [...entropy].map((_, cell) => cut.start(cell));
  const bound = places.map((place) => Math.log(layer.causal ? place + 1 : layer.cols.count));
  const values = [...entropy].map((value) => (Number.isNaN(value) ? null : value));
  const query = chosenQuery();
  const curve = { type: "scatter", x: places };
  plot("entropies", [
    { ...curve, y: bound, mode: "lines", line: { color: css("--muted"), width: 1, dash: "dot" }, hoverinfo: "skip" },
    {
      ...curve, y: values, mode: places.length > 60 ? "lines" : "lines+markers", hoverinfo: "none", connectgaps: false,
      line: { color: css("--accent"), width: 1.6 }, marker: { size: 4 },
    },
  ], plotLayout({
    width: $("entropies").clientWidth, height: 230, margin: smallMargin,
    shapes: query < 0 ? [] : [{ type: "line", x0: query, x1: query, yref: "paper", y0: 0, y1: 1, line: marked() }],
    xaxis: { title: { text: "position of the query" }, nticks: 7 },
    yaxis: { title: { text: "nats" }, rangemode: "tozero", nticks: 5, showgrid: true, gridcolor: css("--line") },
  }), {
    hover: ({ event, points: [{ x, y }] }) => showTip(event, [
      ["query", visible(headShown.layer.from.tokens[x]), `at ${x}`], ["entropy", null, `${y.toFixed(2)} nats`],
    ]),
    click: ({ points: [{ x }] }) => chooseToken(x, "to"),
  });
  const there = values.filter((value) => value !== null);
  const range = there.length ? `from ${Math.min(...there).toFixed(2)} to ${Math.max(...there).toFixed(2)} nats` : "unknown";
  $("entropies").setAttribute("aria-label", `Entropy by position: ${range}`);
}

/** Pairs of token texts, query and key, by the mass between them in all. */
function tokenPairs({ layer, kept, ...rest }) {
  const pairs = new Map();
  for (let query = 0; query < layer.from.tokens.length; query++) {
    for (const [key, value] of topKeys({ kept, ...rest }, query)) {
      const name = JSON.stringify([layer.from.tokens[query], layer.to.tokens[key]]);
      const pair = pairs.get(name) ?? { query, key, best: 0, mass: 0, times: 0 };
      if (value > pair.best) [pair.query, pair.key, pair.best] = [query, key, value];
      pairs.set(name, { ...pair, mass: pair.mass + value, times: pair.times + 1 });
    }
  }
  return [...pairs.values()].sort((a, b) => b.mass - a.mass).slice(0, 12);
}

function drawPairs() {
  const { layer } = headShown;
  $("pairs").replaceChildren(...tokenPairs(headShown).map(({ query, key, mass, times }) => {
    const button = el("button", { type: "button", class: "plain" }, tokenCode(layer.from, query), " → ", tokenCode(layer.to, key));
    button.addEventListener("click", () => chooseToken(query, "to"));
    return el("li", {}, el("b", {}, weight(mass / times)), button, el("small", {}, times > 1 ? `× ${times}` : ""));
  }));
}

function connectHead() {
  $("zoom-in").addEventListener("click", () => zoom(0.5));
  $("zoom-out").addEventListener("click", () => zoom(2));
  $("zoom-whole").addEventListener("click", () => zoom(0));
  for (const input of document.getElementsByName("scale")) {
    input.addEventListener("change", () => { state.scale = input.value; redraw(); });
  }
  $("map").addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const { rows } = headShown.layer;
    chooseToken(rows.start(Math.max(0, Math.min(rows.cells - 1, rows.cell(Math.max(0, chosenQuery())) + step))), "to");
  });
}
