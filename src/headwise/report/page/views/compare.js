// Two looks side by side: the difference of each figure of the same head, and of its maps.

views.compare = {
  title: "Compare",
  there: () => runs.length === 2,
  async load() {
    const rows = runs.map((_, run) => sameHead(chosen(), run));
    return Promise.all(rows.map((row) => row && headMap(row)));
  },
  draw(maps) {
    const both = runs[0].columns.filter(({ key }) => runs[1].column.has(key));
    if (!both.some(({ key }) => key === comparing.key)) comparing.key = both[0]?.key;
    const names = both.map(({ key, short, title }) => [key, key.endsWith("_random") ? `${short} (random)` : short, title]);
    switches($("differences-of"), "difference", names, comparing.key, (key) => { comparing.key = key; drawDifferences(); });
    drawDifferences();
    drawBothMaps(maps);
  },
};

const comparing = { key: undefined };
const nameOf = (row) => `${row.module}.${row.head}`;

/** A row of either look as that of look `run`; undefined where there is none. */
const sameHead = (row, run) => runs[run].rows[runs[run].byName.get(nameOf(row))];

/** Heads of the same module and number in A and in B, with B's figure less A's; null where one lacks it. */
function pairs(key) {
  return runs[0].rows.map((a) => ({ a, b: sameHead(a, 1) })).filter(({ b }) => b).map(({ a, b }) =>
    ({ a, b, change: typeof a[key] === "number" && typeof b[key] === "number" ? b[key] - a[key] : null }));
}

function drawDifferences() {
  const column = runs[0].column.get(comparing.key);
  const found = pairs(comparing.key);
  const [first, second] = runs.map(({ title }) => title);
  $("compare-what").replaceChildren(el("b", {}, "A "), `${first}; `, el("b", {}, "B "), `${second}. `,
    `${whole(found.length)} of ${counted(runs[0].rows.length, "head")} of A are in B: the same module and number. Differences are B − A.`);
  const there = found.filter(({ change }) => change !== null);
  $("difference-panel").hidden = !there.length;
  if (!there.length) return;
  drawDifferenceMap(column, there);
  drawDifferenceTable(column, there);
}

/** The map of heads of A, with how much B differs. */
function drawDifferenceMap(column, there) {
  const [look] = runs;
  const changes = new Map(there.map(({ a, change }) => [a, change]));
  const end = Math.max(1e-9, ...[...changes.values()].map(Math.abs));
  const margin = headsMargin(true, look);
  plot("differences", [{
    type: "heatmap", z: headsGrid((row) => changes.get(row), look), zmin: -end, zmax: end, colorscale: diverging(), xgap: 2, ygap: 2,
    hoverinfo: "none", hoverongaps: false, colorbar: colourBar({ nticks: 5 }),
  }], headsLayout($("differences").clientWidth, margin, sameHead(chosen(), 0), look), {
    click: ({ points: [{ x, y }] }) => choose(data.byName.get(nameOf(look.rows[look.places.get(`${y}.${x}`)]))),
    hover: ({ event, points: [{ x, y, z }] }) => {
      const row = look.rows[look.places.get(`${y}.${x}`)];
      showTip(event, [[headName(row), null, row.of.reads], ["B − A", null, signed(z, look.column.get(comparing.key))]]);
    },
  }).setAttribute("aria-label", `Differences of ${column.title.toLowerCase()}, head by head; the table beside it has the largest`);
}

/** A difference with its sign; one that rounding would leave nothing of, to two digits. */
function signed(value, column) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const small = size < 1e-4 ? value.toExponential(1) : value.toPrecision(2);
  return (value > 0 ? "+" : "") + (size < 10 ** -column.digits ? small.replaceAll("-", "−") : figure(value, column));
}

function drawDifferenceTable(column, there) {
  $("difference-title").textContent = `${column.title}: the largest differences`;
  const order = [...there].sort((x, y) => Math.abs(y.change) - Math.abs(x.change)).slice(0, 40);
  $("difference-table").tBodies[0].replaceChildren(...order.map(({ a, b, change }) => {
    const button = el("button", { type: "button", "aria-label": headName(a) }, headShort(a));
    const line = el("tr", { class: nameOf(a) === nameOf(chosen()) ? "chosen" : "", title: a.module }, el("th", { scope: "row" }, button),
      ...[a, b].map((row) => el("td", {}, figure(row[column.key], column))), el("td", {}, el("b", {}, signed(change, column))),
      el("td", { class: "words" }, firstLabel(a) === firstLabel(b) ? firstLabel(a) : `${firstLabel(a)} → ${firstLabel(b)}`));
    line.addEventListener("click", () => choose(data.byName.get(nameOf(a))));
    return line;
  }));
}

/** The chosen head's map in A, in B, and their difference where both have the same cells. */
function drawBothMaps(maps) {
  const rows = runs.map((_, run) => sameHead(chosen(), run));
  $("both-title").textContent = headName(chosen());
  $("both-module").textContent = chosen().module;
  rows.forEach((row, run) => {
    $(`both-${run}`).hidden = !row;
    if (row) drawMap(`both-map-${run}`, row, maps[run], { small: true }).setAttribute("aria-label", `Map of the head in ${"AB"[run]}`);
  });
  const same = rows.every(Boolean) && ["rows", "cols"].every((axis) => {
    const [a, b] = rows.map((row) => row.of[axis]);
    return a.cells === b.cells && a.count === b.count;
  });
  $("both-2").hidden = !same;
  $("both-what").textContent = same ? aboutDifference(rows) : rows.every(Boolean)
    ? "The two maps differ in size, so there is no difference of them: look at as many tokens in both." : "Only one of the two has this head.";
  if (!same) return;
  const change = mapRows(rows[0].of, maps[1].map((value, place) => value - maps[0][place]), (value) => Math.sign(value) * Math.sqrt(Math.abs(value)));
  drawMap("both-map-2", rows[0], maps[0], { small: true, z: change, scale: { zmin: -1, zmax: 1, colorscale: diverging() } })
    .setAttribute("aria-label", "Difference of the two maps: orange where B has more weight, blue where A has");
}

/** What the difference shows, and whether the two were looked at on different tokens. */
function aboutDifference([a, b]) {
  const differ = ["from", "to"].some((side) => a.of[side].tokens.some((token, index) => token !== b.of[side].tokens[index]));
  return (differ ? "The tokens differ between A and B: places are compared, not words. " : "") +
    "In the difference, orange is more weight in B, blue more in A; square roots, as in the maps.";
}
