// The table of heads: sorted by any column, filtered by words, labels and conditions.

import { $, dark, el } from "../shared/dom.js";
import { counted, headName, parseHead, percent, whole } from "../shared/words.js";
import { choose, remember } from "./choice.js";
import { glyph, headButton } from "./labels.js";
import { NONE, allLabels, data, firstLabel, hasLabel } from "./look.js";
import { state } from "./state.js";
import { figure } from "./words.js";

const sorting = { key: "place", down: false };
const LINES = 40;  // rows added at a time
const listed = { now: "", order: [], shared: new Map() };

export const tableView = {
  title: "Table",
  kept: { sort: [() => (sorting.down ? "-" : "") + sorting.key, (value) => { Object.assign(sorting, { key: value.replace(/^-/, ""), down: value.startsWith("-") }); }] },
  draw() {
    if ($("table").look !== data) drawTableHead();
    $("only").value = state.only;
    $("filter").value = state.filter;
    listHeads();
    markRow();
    sayMoreColumns();
  },
};

/** The coverage of a column if it is the same for every head, as it is if all masks are the same; else null. */
function sharedCoverage(key) {
  const all = data.rows.map((row) => row[`${key}_coverage`]);
  return typeof all[0] === "number" && all.every((value) => value === all[0]) ? all[0] : null;
}

function drawTableHead() {
  $("table").look = data;
  $("only").replaceChildren(el("option", { value: "" }, "all labels"), ...data.labels.map((name) => el("option", { value: name }, name)));
  listed.shared = new Map(data.columns.map(({ key }) => [key, sharedCoverage(key)]));
  $("table").tHead.rows[0].replaceChildren(tableHead("place", "head", "words"), tableHead("label", "labels", "words"),
    ...data.columns.map((column) => tableHead(column.key, column.short, "", column.title, listed.shared.get(column.key))));
}

function tableHead(key, text, kind, title = "", covered = null) {
  const button = el("button", { type: "button", ...(title ? { title } : {}) }, text);
  const notes = [key.endsWith("_random") ? "random" : "", covered !== null && covered < 0.995 ? percent(covered) : ""];
  for (const note of notes) if (note) button.append(el("small", {}, note));
  button.addEventListener("click", () => {
    sorting.down = sorting.key === key ? !sorting.down : kind !== "words";
    sorting.key = key;
    remember();
    listHeads();
  });
  return el("th", { scope: "col", "data-key": key, class: kind }, button);
}

function tableRow(index) {
  const row = data.rows[index];
  const kind = row.of.reads;
  const labels = row.labels.length ? row.labels.map(({ label }) => {
    return el("span", { class: "tag" }, glyph(label), label);
  }) : [el("small", {}, NONE)];
  const cells = data.columns.map((column) => {
    const { key, unit } = column;
    const cell = el("td", {}, figure(row[key], column));
    if (unit === "share") { cell.className = "bar"; cell.style.setProperty("--w", row[key] ?? 0); }
    const [error, coverage] = [row[`${key}_se`], row[`${key}_coverage`]];
    if (typeof error === "number") cell.append(" ", el("small", {}, `± ${figure(error, column)}`));
    if (typeof coverage === "number" && listed.shared.get(key) === null) cell.append(" ", el("small", {}, percent(coverage)));
    return cell;
  });
  const line = el("tr", { "data-row": index },
    el("th", { scope: "row" }, headButton(row, null, ""), kind ? el("small", {}, ` ${kind}`) : ""), el("td", { class: "words" }, ...labels), ...cells);
  line.title = row.module;
  line.addEventListener("click", () => choose(index));
  return line;
}

/** The value that a row is sorted by; rows without one come last. */
function sortValue(row, index, key) {
  if (key === "place") return index;
  if (key === "label") return data.labels.indexOf(firstLabel(row));
  return row[key] ?? null;
}

/** A function that compares two rows, given by index, for the chosen order. */
function inOrder({ key, down }) {
  return (a, b) => {
    const [x, y] = [a, b].map((index) => sortValue(data.rows[index], index, key));
    if (x === null || y === null) return Number(x === null) - Number(y === null) || a - b;
    return (down ? y - x : x - y) || a - b;
  };
}

/** The key of the metric with a name: its key, its short name or its title. */
export const columnNamed = (name) => data.columns.find(({ key, short, title }) => [key, short, title].some((one) => one.toLowerCase().replace(/\W+/g, "_") === name))?.key;

/** The words of the filter; a condition is one word, even if it contains spaces. */
const filterWords = () => state.filter.toLowerCase().replace(/\s*(<=|>=|<|>|=)\s*/g, "$1").split(/\s+/).filter(Boolean);

/** A word of the filter as a test of a row: `entropy>2` tests a metric, other words names and labels; undefined if malformed. */
export function condition(word) {
  const [, name, sign, number] = word.match(/^([^<>=]+)(<=|>=|<|>)(-?\d*\.?\d+)$/) ?? [];
  const key = name && columnNamed(name);
  if (!key) {
    if (/[<>=]/.test(word)) return undefined;
    const text = parseHead(word) ? `l${word.replace(".", "h")}` : word;
    return (row) => `${headName(row)} ${row.module} ${allLabels(row)} ${row.of.reads}`.toLowerCase().includes(text);
  }
  const compare = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b }[sign];
  return (row) => typeof row[key] === "number" && compare(row[key], Number(number));
}

/** Lists the heads that match the filter, in the chosen order. */
function listHeads() {
  const now = [state.run, state.filter, state.only, sorting.key, sorting.down, dark.matches].join("\n");
  if (now === listed.now) return;
  listed.now = now;
  const words = filterWords();
  const wrong = words.filter((word) => !condition(word));
  const tests = words.map(condition).filter(Boolean);
  if (state.only) tests.push((row) => hasLabel(row, state.only));
  const { length } = data.rows;
  listed.order = [...data.rows.keys()].filter((index) => tests.every((test) => test(data.rows[index]))).sort(inOrder(sorting));
  $("found").textContent = listed.order.length === length ? counted(length, "head") : `${whole(listed.order.length)} of ${counted(length, "head")}`;
  const example = data.columns[0] ? `${data.columns[0].key}>1` : "";
  $("filter-said").textContent = wrong.length
    ? `Not understood: ${wrong.join(" ")}. A condition is a metric, an operator (<, >, <=, >=) and a number, such as ${example}.`
    : listed.order.length ? "" : "Nothing matches.";
  $("filter").setAttribute("aria-invalid", String(wrong.length > 0));
  for (const cell of $("table").tHead.rows[0].cells) {
    if (cell.dataset.key === sorting.key) cell.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  $("table").setAttribute("aria-rowcount", String(listed.order.length + 1));
  $("table").tBodies[0].replaceChildren();
  addLines();
}

/** Adds the next rows to the table: at the start, and when scrolling approaches its end. */
function addLines() {
  const body = $("table").tBodies[0];
  const from = body.rows.length;
  body.append(...listed.order.slice(from, from + LINES).map(tableRow));
  if (from) markRow();
}

/** Shows a note if there are columns out of view. */
function sayMoreColumns() {
  const box = $("table").parentElement;
  const left = box.scrollWidth - box.clientWidth - box.scrollLeft;
  $("more-columns").textContent = box.scrollWidth <= box.clientWidth + 4 ? ""
    : left > 4 ? "More columns to the right: scroll sideways, or focus the table and use the arrow keys." : "This is the last column; scroll left for the first ones.";
  box.classList.toggle("goes-on", left > 4);
}

function markRow() {
  for (const line of $("table").tBodies[0].rows) line.classList.toggle("chosen", Number(line.dataset.row) === state.row);
}

export function connectTable() {
  const relist = () => { remember(); listHeads(); markRow(); };
  $("filter").addEventListener("input", () => { state.filter = $("filter").value; relist(); });
  $("only").addEventListener("change", () => { state.only = $("only").value; relist(); });
  const box = $("table").parentElement;
  box.addEventListener("scroll", () => {
    if (box.scrollTop + box.clientHeight > box.scrollHeight - 300) addLines();
    sayMoreColumns();
  }, { passive: true });
}
