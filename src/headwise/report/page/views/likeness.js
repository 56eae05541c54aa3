// How alike heads are, in pairs.

const likeness = { order: "layer", rows: [], drawn: "", full: null };

views.likeness = {
  title: "Likeness",
  there: () => data.similarity !== null,
  load: () => numbers(data.similarity),
  draw({ values }) {
    switches($("likeness-orders"), "likeness-order",
      [["layer", "by layer and head"], ["label", "by label"], ["likeness", "like beside like"]], likeness.order, (order) => {
        likeness.order = order;
        redraw();
      });
    drawLikeness(values);
    drawAlike(values);
  },
};

/** How alike rows a and b are, from the pairs above the diagonal; NaN where they cannot be compared. */
function alike(values, a, b) {
  if (a === b) return 1;
  const [low, high] = a < b ? [a, b] : [b, a];
  return values[low * data.rows.length - (low * (low + 1)) / 2 + high - low - 1];
}

/** Rows one after another, each the most alike to the one before of those left. */
function chain(values) {
  const left = new Set(data.rows.keys());
  const found = [0];
  left.delete(0);
  while (left.size) {
    const last = found[found.length - 1];
    let [best, most] = [left.values().next().value, -Infinity];
    for (const row of left) {
      const value = alike(values, last, row);
      if (value > most) [best, most] = [row, value];
    }
    found.push(best);
    left.delete(best);
  }
  return found;
}

function drawLikeness(values) {
  const width = $("likeness").clientWidth;
  const order = [state.run, likeness.order, width, dark.matches].join();
  if (order !== likeness.drawn) {
    likeness.rows = { layer: () => [...data.rows.keys()], label: byLabel, likeness: () => chain(values) }[likeness.order]();
    likeness.drawn = order;
    const count = likeness.rows.length;
    const z = likeness.rows.map((a) => Float32Array.from(likeness.rows, (b) => alike(values, a, b)));
    const every = Math.ceil((count * 17) / width);
    const ticks = likeness.rows.map((_, place) => place).filter((place) => place % every === 0);
    const axis = { tickvals: ticks, ticktext: ticks.map((place) => headShort(data.rows[likeness.rows[place]])), tickfont: muted(10) };
    const side = Math.min(width, 760);
    const margin = { l: 44, r: 52, t: 6, b: 44 };
    plot("likeness", [{
      type: "heatmap", z, zmin: 0, zmax: 1, colorscale: "Viridis", hoverinfo: "none", zsmooth: count > 400 ? "fast" : false,
      colorbar: colourBar({ nticks: 6 }),
    }], plotLayout({
      width: side, height: side - margin.l - margin.r + margin.t + margin.b, margin, shapes: likenessShapes(),
      xaxis: { ...axis, tickangle: -90 }, yaxis: { ...axis, range: [count - 0.5, -0.5] },
    }), {
      click: ({ points: [{ y }] }) => choose(likeness.rows[y]),
      hover: ({ event, points: [{ x, y, z: value }] }) => {
        const [a, b] = [data.rows[likeness.rows[y]], data.rows[likeness.rows[x]]];
        const shown = Number.isNaN(value) ? "–" : value.toFixed(2);
        showTip(event, [[headName(a), null, allLabels(a)], [headName(b), null, allLabels(b)], ["likeness", null, shown]]);
      },
    });
  } else Plotly.relayout($("likeness"), { shapes: likenessShapes() });
  $("likeness-what").replaceChildren("1 is the same map. ", ...subscripts(data.provenance.similarity ?? ""));
  $("likeness").setAttribute("aria-label",
    `Likeness of ${counted(data.rows.length, "head")} in pairs; the list beside it has the most alike to ${headName(chosen())}`);
}

function likenessShapes() {
  const place = likeness.rows.indexOf(state.row);
  const end = likeness.rows.length - 0.5;
  return [{ type: "rect", x0: -0.5, x1: end, y0: place - 0.5, y1: place + 0.5, line: marked() }];
}

function drawAlike(values) {
  const found = [...data.rows.keys()].filter((row) => row !== state.row).map((row) => [row, alike(values, state.row, row)])
    .filter(([, value]) => !Number.isNaN(value))
    .sort((a, b) => b[1] - a[1]).slice(0, 10);
  $("alike-title").textContent = `Most alike to ${headName(chosen()).toLowerCase()}`;
  $("alike").replaceChildren(...found.map(([row, value]) => headLine(data.rows[row], value.toFixed(2), row)));
}

/** A line of a list of heads: figure, head, label. */
function headLine(row, value, index) {
  const button = el("button", { type: "button", class: "plain", "aria-label": headName(row) }, headShort(row));
  button.addEventListener("click", () => choose(index));
  return el("li", {}, el("b", {}, value), button, el("small", {}, allLabels(row)));
}
