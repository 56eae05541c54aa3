// The map of heads, the chosen head's figures, the table.

function chosen() { return data.rows[state.row]; }

// Okabe and Ito's colours, told apart by colour-blind readers too; grey is for no label.
const LABEL_COLOURS = ["#d55e00", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#cc79a7", "#8a8f96"];
const labelNames = [...data.rules.map((rule) => rule.label), data.no_label];

function drawStatistics() {
  const chip = (key, short, title) => {
    const input = el("input", { type: "radio", name: "statistic", value: key, "aria-label": title });
    input.checked = key === state.statistic;
    input.addEventListener("change", () => { state.statistic = key; drawHeads(); });
    return el("label", { title }, input, el("span", {}, short));
  };
  const chips = (random) => data.columns.filter(({ key }) => key.endsWith("_random") === random)
    .map(({ key, short, title }) => chip(key, short, title));
  $("statistics").append(chip("label", "label", "Label"), ...chips(false), el("div", { class: "group" }),
    el("i", {}, "on random repeats:"), ...chips(true));
}

/** The ends of the colour scale: shares are always 0 to 1, so that maps can be compared. */
function colourRange(column, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (column.unit === "share") return [0, 1];
  const highest = Math.max(...known, 1e-6);
  return column.unit === "logit" ? [Math.min(...known, highest - 1e-6), highest] : [0, highest];
}

/** The map's values with their colours: a figure, or the label as a number. */
function headsTrace() {
  const column = columns.get(state.statistic);
  const grid = Array.from({ length: data.layers }, () => Array(data.heads).fill(null));
  for (const row of data.rows) {
    grid[row.layer][row.head] = column ? row[column.key] : labelNames.indexOf(row.label);
  }
  const shared = { type: "heatmap", z: grid, xgap: 2, ygap: 2, hoverinfo: "none" };
  if (column) {
    const [zmin, zmax] = colourRange(column, grid.flat());
    return { ...shared, zmin, zmax, colorscale: "Viridis", colorbar: colourBar({ nticks: 5 }) };
  }
  const colorscale = labelNames.flatMap((_, index) => {
    const colour = LABEL_COLOURS[Math.min(index, LABEL_COLOURS.length - 1)];
    return [[index / labelNames.length, colour], [(index + 1) / labelNames.length, colour]];
  });
  return { ...shared, zmin: -0.5, zmax: labelNames.length - 0.5, colorscale, showscale: false };
}

/** What is written in the cells, where they are wide enough for it. */
function cellTexts(trace, cellWidth) {
  const column = columns.get(state.statistic);
  if (cellWidth < 34) return [];
  const named = (row) => (cellWidth < 62 ? data.rules.find(({ label }) => label === row.label)?.brief ?? "–"
    : row.label.replace(/ (\S+)$/, "<br>$1"));
  return data.rows.map((row) => {
    const value = trace.z[row.layer][row.head];
    const share = (value - trace.zmin) / (trace.zmax - trace.zmin);
    const light = column ? share > 0.52 : value !== 5;
    const text = column ? figure(value, column.unit) : named(row);
    return {
      x: row.head, y: row.layer, text, showarrow: false,
      font: { size: column ? 12.5 : 11, color: value === null ? css("--ink") : light ? "#14171a" : "#ffffff" },
    };
  });
}

function drawHeads() {
  const plot = $("heads");
  const column = columns.get(state.statistic);
  const width = plot.clientWidth;
  const trace = headsTrace();
  const cell = Math.max(22, Math.min(64, 420 / data.layers));
  const across = (width - 110) / data.heads;
  const layout = plotLayout({
    width, height: cell * data.layers + 66, margin: { l: 52, r: 58, t: 10, b: 44 },
    xaxis: { title: { text: "head" }, dtick: Math.max(1, Math.ceil(24 / across)), tick0: 0 },
    yaxis: { title: { text: "layer" }, dtick: Math.max(1, Math.ceil(data.layers / 24)), tick0: 0, autorange: "reversed" },
    shapes: chosenShapes(), annotations: cellTexts(trace, across),
  });
  Plotly.react(plot, [trace], layout, plotOptions);
  const title = column?.title ?? "Label";
  plot.setAttribute("aria-label", `Map of heads: ${title}, ${data.layers} layers by ${data.heads} heads`);
  const meaning = column?.meaning ?? "What a head does, by the rules below: each head has the first label that fits its figures.";
  $("what").replaceChildren(el("b", {}, `${title}. `), meaning);
  drawLegend(!column);
}

/** The labels with their colours and how many heads have them. */
function drawLegend(shown) {
  $("legend").hidden = !shown;
  $("legend").replaceChildren(...labelNames.flatMap((name, index) => {
    const count = data.rows.filter((row) => row.label === name).length;
    if (!count) return [];
    const swatch = el("i");
    swatch.style.background = LABEL_COLOURS[Math.min(index, LABEL_COLOURS.length - 1)];
    return [el("li", {}, swatch, `${name} `, el("b", {}, whole(count)))];
  }));
}

/** A frame round the chosen head: two lines, so that it shows on any colour. */
function chosenShapes() {
  const { layer, head } = chosen();
  const box = { type: "rect", x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5 };
  return [["--panel", 7], ["--ink", 3]].map(([colour, width]) => ({ ...box, line: { color: css(colour), width } }));
}

function connectHeads() {
  const plot = $("heads");
  plot.on("plotly_click", ({ points: [point] }) => choose(rowAt(point.y, point.x)));
  plot.on("plotly_hover", ({ event, points: [point] }) => {
    const row = data.rows[rowAt(point.y, point.x)];
    const column = columns.get(state.statistic);
    const lines = [[headName(row), null, ""], ["Label", null, row.label]];
    if (column) lines.push([column.title, null, figure(row[column.key], column.unit) + unitName[column.unit]]);
    const coverage = row[`${state.statistic}_coverage`];
    if (typeof coverage === "number") lines.push(["Coverage", null, percent(coverage)]);
    showTip(event, lines);
  });
  plot.on("plotly_unhover", hideTip);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    const { layer, head } = chosen();
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    choose(rowAt(within(layer + move[0], data.layers), within(head + move[1], data.heads)));
  });
  $("previous-head").addEventListener("click", () => choose((state.row || data.rows.length) - 1));
  $("next-head").addEventListener("click", () => choose((state.row + 1) % data.rows.length));
}

const rowAt = (layer, head) => data.rows.findIndex((row) => row.layer === layer && row.head === head);

/** Makes row `index` the chosen head, wherever it is shown; −1 is no row. */
function choose(index) {
  if (index < 0) return;
  state.row = index;
  Plotly.relayout($("heads"), { shapes: chosenShapes() });
  history.replaceState(null, "", `#${chosen().layer}.${chosen().head}`);
  drawReadout();
  markRow();
  $("said").textContent = `${headName(chosen())}: ${chosen().label}`;
  return drawAttention();
}

function drawReadout() {
  const row = chosen();
  $("head-title").textContent = headName(row);
  const column = columns.get(row.label_key);
  const why = column
    ? `: ${column.title.toLowerCase()} ${figure(row.label_score, column.unit)}${unitName[column.unit]}` +
      (row.label_coverage < 0.995 ? ` on ${percent(row.label_coverage)} of the queries` : "")
    : ": no rule holds";
  $("head-label").replaceChildren(el("b", {}, row.label), why);
  $("readout").replaceChildren(...data.columns.flatMap(({ key, title, unit }) => {
    const value = row[key];
    const term = el("dt", {}, title);
    const coverage = row[`${key}_coverage`];
    if (typeof coverage === "number" && coverage < 0.995) term.append(" ", el("small", {}, `on ${percent(coverage)}`));
    const bar = el("div", { class: unit === "share" ? "bar" : "bar plain", role: "presentation" });
    if (unit === "share") {
      const fill = el("i");
      fill.style.width = `${100 * (value ?? 0)}%`;
      bar.append(fill);
    }
    return [term, el("dd", {}, figure(value, unit) + unitName[unit]), bar];
  }));
}

const sorting = { key: "place", down: false };

function drawTable() {
  const head = (key, title, words) => {
    const button = el("button", { type: "button" }, title);
    const covered = sharedCoverage(key) ?? 1;
    const notes = [key.endsWith("_random") ? "random" : "", covered < 0.995 ? percent(covered) : ""];
    for (const note of notes) if (note) button.append(el("small", {}, note));
    button.addEventListener("click", () => {
      sorting.down = sorting.key === key ? !sorting.down : !["place", "label"].includes(key);
      sorting.key = key;
      sortTable();
    });
    const name = columns.get(key)?.title;
    if (name) { button.title = name; button.setAttribute("aria-label", name); }
    return el("th", { scope: "col", "data-key": key, ...(words ? { class: "words" } : {}) }, button);
  };
  $("table").tHead.rows[0].append(head("place", "layer.head", true), head("label", "label", true),
    ...data.columns.map(({ key, short }) => head(key, short, false)));
  $("table").tBodies[0].append(...data.rows.map(tableRow));
  sortTable();
}

function tableRow(row, index) {
  const button = el("button", { type: "button", "aria-label": headName(row) }, `${row.layer}.${row.head}`);
  const line = el("tr", { "data-row": index }, el("td", {}, button), el("td", { class: "words" }, row.label));
  for (const { key, unit } of data.columns) {
    const cell = el("td", {}, figure(row[key], unit));
    if (unit === "share") { cell.className = "bar"; cell.style.setProperty("--w", row[key] ?? 0); }
    const coverage = row[`${key}_coverage`];
    if (typeof coverage === "number" && sharedCoverage(key) === null) cell.append(" ", el("small", {}, percent(coverage)));
    line.append(cell);
  }
  line.addEventListener("click", () => choose(index));
  return line;
}

function sortTable() {
  const { key, down } = sorting;
  const value = (line) => {
    const row = data.rows[line.dataset.row];
    return key === "place" ? Number(line.dataset.row) : row[key];
  };
  const lines = [...$("table").tBodies[0].rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "string" ? x.localeCompare(y) : x - y;
    return (down ? -order : order) || a.dataset.row - b.dataset.row;
  });
  $("table").tBodies[0].append(...lines);
  for (const cell of $("table").tHead.rows[0].cells) {
    if (cell.dataset.key === key) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
}

function markRow() {
  for (const line of $("table").tBodies[0].rows) line.classList.toggle("chosen", Number(line.dataset.row) === state.row);
}
