// Any figure of the heads against any other: importance against ablation, to begin with.

const axes = { x: "", y: "" };

views.scatter = {
  title: "Scatter",
  there: () => data.columns.length > 1,
  draw() {
    const there = data.columns.map(({ key }) => key).filter((key) => known(data.rows, key).length);
    if (!there.includes(axes.x) || !there.includes(axes.y)) {
      [axes.x, axes.y] = ["importance", "ablation"].every((key) => there.includes(key)) ? ["importance", "ablation"] : there.slice(0, 2);
    }
    for (const name of ["x", "y"]) {
      $(`axis-${name}`).replaceChildren(...there.map((key) => el("option", { value: key }, data.column.get(key).title)));
      $(`axis-${name}`).value = axes[name];
    }
    drawScatter();
  },
};

/** Ranks from 0; equal values share the mean of theirs. */
function ranks(values) {
  const order = [...values.keys()].sort((a, b) => values[a] - values[b]);
  const found = Array(values.length);
  for (let from = 0; from < order.length;) {
    let to = from;
    while (to + 1 < order.length && values[order[to + 1]] === values[order[from]]) to++;
    for (let place = from; place <= to; place++) found[order[place]] = (from + to) / 2;
    from = to + 1;
  }
  return found;
}

/** Spearman's rank correlation; NaN where one of the two never changes. */
function rankCorrelation(x, y) {
  const [a, b] = [ranks(x), ranks(y)];
  const mean = (a.length - 1) / 2;
  let [both, left, right] = [0, 0, 0];
  a.forEach((rank, index) => {
    both += (rank - mean) * (b[index] - mean);
    left += (rank - mean) ** 2;
    right += (b[index] - mean) ** 2;
  });
  return both / Math.sqrt(left * right);
}

const errors = (rows, key) => {
  const array = rows.map((row) => row[`${key}_se`] ?? 0);
  return array.some((value) => value > 0) ? { type: "data", array, thickness: 1, width: 0, color: css("--line-strong") } : undefined;
};

function drawScatter() {
  const [x, y] = [data.column.get(axes.x), data.column.get(axes.y)];
  const places = [...data.rows.keys()].filter((row) => [x, y].every(({ key }) => typeof data.rows[row][key] === "number"));
  const rows = places.map((place) => data.rows[place]);
  const [across, up] = [x, y].map(({ key }) => rows.map((row) => row[key]));
  const width = $("scatter").clientWidth;
  const axis = (column) => ({
    title: { text: harmless(column.title + (unitName(column) && `,${unitName(column)}`)) }, showgrid: true, gridcolor: css("--line"),
    zeroline: true, zerolinecolor: css("--line-strong"), nticks: 7,
  });
  plot("scatter", [{
    type: "scatter", mode: "markers", x: across, y: up, customdata: places, hoverinfo: "none",
    error_x: errors(rows, x.key), error_y: errors(rows, y.key),
    marker: {
      size: places.map((place) => (place === state.row ? 15 : 9)), color: rows.map((row) => labelColour(firstLabel(row))),
      line: { width: places.map((place) => (place === state.row ? 2.5 : 0.8)), color: css("--ink") },
      opacity: rows.map((row) => (state.only && !hasLabel(row, state.only) ? 0.12 : 1)),
    },
  }], plotLayout({
    width, height: Math.min(560, Math.max(320, width * 0.62)), margin: { l: 62, r: 16, t: 10, b: 52 }, xaxis: axis(x), yaxis: axis(y),
  }), {
    click: ({ points: [{ customdata }] }) => choose(customdata),
    hover: ({ event, points: [{ customdata }] }) => {
      const row = data.rows[customdata];
      const line = (key) => [data.column.get(key).title, null, figure(row[key], data.column.get(key))];
      showTip(event, [...headTip(row), line(axes.x), line(axes.y)]);
    },
  });
  const agreement = rankCorrelation(across, up);
  const said = Number.isNaN(agreement) ? "no rank correlation: one of the two never changes" : `rank correlation ${figure(agreement)} (Spearman)`;
  $("scatter-what").textContent = `${counted(rows.length, "head")}, ${said}.`;
  $("scatter").setAttribute("aria-label", `${y.title} against ${x.title}: ${counted(rows.length, "head")}, ${said}. The table has all figures`);
  drawScatterLegend(rows);
  const order = [...places].sort((a, b) => data.rows[b][y.key] - data.rows[a][y.key]).slice(0, 10);
  $("highest-title").textContent = `Highest: ${y.title.toLowerCase()}`;
  $("highest").replaceChildren(...order.map((place) => headLine(data.rows[place], figure(data.rows[place][y.key], y), place)));
}

function drawScatterLegend(rows) {
  $("scatter-legend").replaceChildren(...data.labels.filter((name) => rows.some((row) => firstLabel(row) === name)).map((name) => {
    const mark = el("i", { class: "swatch" });
    mark.style.background = labelColour(name);
    return el("li", {}, mark, name);
  }));
}

function connectScatter() {
  for (const name of ["x", "y"]) {
    $(`axis-${name}`).addEventListener("change", () => { axes[name] = $(`axis-${name}`).value; drawScatter(); });
  }
}
