// The table of heads: sorted by any column, filtered by words, labels and conditions.

const sorting = { key: "place", down: false };
const filter = { text: "", label: "" };

views.table = {
  title: "Table",
  draw() {
    if ($("table").look !== data) buildTable();
    filter.label = state.only;
    $("only").value = state.only;
    filterTable();
    markRow();
  },
};

/** The coverage of a column when it is the same for every head, as it is where masks are alike. */
function sharedCoverage(key) {
  const all = data.rows.map((row) => row[`${key}_coverage`]);
  return typeof all[0] === "number" && all.every((value) => value === all[0]) ? all[0] : null;
}

function buildTable() {
  $("table").look = data;
  $("only").replaceChildren(el("option", { value: "" }, "all labels"), ...data.labels.map((name) => el("option", { value: name }, name)));
  const shared = new Map(data.columns.map(({ key }) => [key, sharedCoverage(key)]));
  $("table").tHead.rows[0].replaceChildren(tableHead("place", "head", "words"), tableHead("label", "labels", "words"),
    ...data.columns.map((column) => tableHead(column.key, column.short, "", column.title, shared.get(column.key))));
  $("table").tBodies[0].replaceChildren(...data.rows.map((row, index) => tableRow(row, index, shared)));
  sortTable();
}

function tableHead(key, text, kind, title = "", covered = null) {
  const button = el("button", { type: "button", ...(title ? { title, "aria-label": title } : {}) }, text);
  const notes = [key.endsWith("_random") ? "random" : "", covered !== null && covered < 0.995 ? percent(covered) : ""];
  for (const note of notes) if (note) button.append(el("small", {}, note));
  button.addEventListener("click", () => {
    sorting.down = sorting.key === key ? !sorting.down : kind !== "words";
    sorting.key = key;
    sortTable();
  });
  return el("th", { scope: "col", "data-key": key, class: kind }, button);
}

function tableRow(row, index, shared) {
  const place = el("button", { type: "button", "aria-label": headName(row) }, headShort(row));
  const kind = row.of.reads;
  const labels = row.labels.length ? row.labels.map(({ label }) => {
    const mark = el("i", { class: "swatch" });
    mark.style.background = labelColour(label);
    return el("span", { class: "tag" }, mark, label);
  }) : [el("small", {}, NONE)];
  const cells = data.columns.map((column) => {
    const { key, unit } = column;
    const cell = el("td", {}, figure(row[key], column));
    if (unit === "share") { cell.className = "bar"; cell.style.setProperty("--w", row[key] ?? 0); }
    const [error, coverage] = [row[`${key}_se`], row[`${key}_coverage`]];
    if (typeof error === "number") cell.append(" ", el("small", {}, `± ${figure(error, column)}`));
    if (typeof coverage === "number" && shared.get(key) === null) cell.append(" ", el("small", {}, percent(coverage)));
    return cell;
  });
  const line = el("tr", { "data-row": index },
    el("th", { scope: "row" }, place, kind ? el("small", {}, ` ${kind}`) : ""), el("td", { class: "words" }, ...labels), ...cells);
  line.title = row.module;
  line.addEventListener("click", () => choose(index));
  return line;
}

/** What a row is sorted by; those without it come last. */
function sortValue(row, index, key) {
  if (key === "place") return index;
  if (key === "label") return data.labels.indexOf(firstLabel(row));
  return row[key] ?? null;
}

function sortTable() {
  const { key, down } = sorting;
  const value = (line) => sortValue(data.rows[line.dataset.row], Number(line.dataset.row), key);
  const lines = [...$("table").tBodies[0].rows].map((line) => [value(line), line]).sort(([x, a], [y, b]) => {
    if (x === null || y === null) return (x === null) - (y === null) || a.dataset.row - b.dataset.row;
    return (down ? y - x : x - y) || a.dataset.row - b.dataset.row;
  });
  $("table").tBodies[0].append(...lines.map(([, line]) => line));
  for (const cell of $("table").tHead.rows[0].cells) {
    if (cell.dataset.key === key) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
}

/** A word of the filter as a test of a row: `entropy>2` on a figure, anything else on names and labels. */
function condition(word) {
  const [, key, sign, number] = word.match(/^(\w+)(<=|>=|<|>)(-?[\d.]+)$/) ?? [];
  if (!data.column.has(key)) {
    return (row) => `${headShort(row)} ${row.module} ${allLabels(row)} ${row.of.reads}`.toLowerCase().includes(word);
  }
  const compare = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b }[sign];
  return (row) => typeof row[key] === "number" && compare(row[key], Number(number));
}

function filterTable() {
  const tests = filter.text.toLowerCase().split(/\s+/).filter(Boolean).map(condition);
  if (filter.label) tests.push((row) => hasLabel(row, filter.label));
  let shown = 0;
  for (const line of $("table").tBodies[0].rows) {
    line.hidden = !tests.every((test) => test(data.rows[line.dataset.row]));
    shown += !line.hidden;
  }
  $("found").textContent = shown === data.rows.length ? counted(shown, "head") : `${whole(shown)} of ${counted(data.rows.length, "head")}`;
}

function markRow() {
  for (const line of $("table").tBodies[0].rows) line.classList.toggle("chosen", Number(line.dataset.row) === state.row);
}

function connectTable() {
  $("filter").addEventListener("input", () => { filter.text = $("filter").value; filterTable(); });
  $("only").addEventListener("change", () => { state.only = filter.label = $("only").value; filterTable(); });
}
