// What all plots have in common: colours, axes, tips.

// Okabe and Ito's colours, then Tol's muted ones: told apart by colour-blind readers too. Grey is for no label.
const LABEL_COLOURS = [
  "#d55e00", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#cc79a7",
  "#44aa99", "#882255", "#ddcc77", "#6a5acd", "#117733",
];

function labelColour(name) {
  const index = data.labels.indexOf(name);
  return name === NONE ? css("--none") : LABEL_COLOURS[index % LABEL_COLOURS.length];
}

/** Black or white, whichever is easier to read on a colour such as `#d55e00`. */
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((place) => (parseInt(colour.slice(place, place + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#14171a" : "#ffffff";
}

/** Blue below zero, orange above, the panel's own colour at zero. */
const diverging = () => [[0, css("--low")], [0.5, css("--panel")], [1, css("--high")]];

/** The colours of a figure and what the ends stand for: shares are 0 to 1, so that maps can be compared. */
function colours(column, values) {
  if (column.unit === "share") return { zmin: 0, zmax: 1, colorscale: "Viridis" };
  const [low, high] = [Math.min(...values, Infinity), Math.max(...values, -Infinity)];
  if (low < 0 && high > 0) {
    const end = Math.max(-low, high);
    return { zmin: -end, zmax: end, colorscale: diverging() };
  }
  const least = column.unit === "logit" ? low : Math.min(0, low);
  return { zmin: least, zmax: Math.max(high, least + 1e-9), colorscale: "Viridis" };
}

const muted = (size = 12) => ({ size, color: css("--muted") });

function plotLayout(extra) {
  const axis = {
    fixedrange: true, zeroline: false, showgrid: false, ticks: "", linecolor: css("--line"), tickfont: muted(),
    title: { font: muted(), standoff: 8 },
  };
  const merged = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: false,
    showlegend: false, font: { family: getComputedStyle(document.body).fontFamily, color: css("--ink"), size: 12 }, ...extra,
  };
  for (const name of ["xaxis", "yaxis"]) {
    merged[name] = { ...axis, ...extra[name], title: { ...axis.title, ...extra[name]?.title } };
  }
  return merged;
}

const plotOptions = { displayModeBar: false, responsive: false, doubleClick: false, showTips: false };

const colourBar = (extra) => ({
  thickness: 10, outlinewidth: 0, len: 1, lenmode: "fraction", x: 1.01, xpad: 4, ypad: 0,
  tickfont: muted(11), ticks: "", ticklabeloverflow: "allow", ...extra,
});

/** Draws, and connects the listeners the first time. */
function plot(id, traces, layout, events = {}) {
  const box = $(id);
  Plotly.react(box, traces, layout, plotOptions);
  if (box.connected) return box;
  box.connected = true;
  for (const [name, listener] of Object.entries(events)) box.on(`plotly_${name}`, listener);
  if (events.hover) box.on("plotly_unhover", hideTip);
  return box;
}

/** A frame round a cell: two lines, so that it shows on any colour. */
const frame = (x, y) => [["--panel", 6], ["--ink", 2.5]].map(([colour, width]) => ({
  type: "rect", x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5, line: { color: css(colour), width },
}));

/** A layer on an axis: its number, and what it reads where models have more than one kind. */
const layerName = (index, look = data) => harmless(`${look.layers[index].reads} ${index}`.trim());

const layersTitle = (look = data) => (look.read.length > 1 ? "" : "layer");
/** The room in pixels that the names of layers take. */
const namesRoom = (look = data) => Math.min(150, 46 + 6.5 * Math.max(...look.layers.map(({ reads }) => reads.length)));

/** The line round what is chosen. */
const marked = (width = 1.5) => ({ color: css("--mark"), width });

/** What a tip says of a head. */
function headTip(row, column) {
  const lines = [[headName(row), null, row.of.reads], ["Label", null, allLabels(row)]];
  if (column) lines.push([column.title, null, figure(row[column.key], column) + unitName(column)]);
  const coverage = column && row[`${column.key}_coverage`];
  if (typeof coverage === "number" && coverage < 0.995) lines.push(["Coverage", null, percent(coverage)]);
  return lines;
}
