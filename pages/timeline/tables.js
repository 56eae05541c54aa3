// The values of the chosen head at the chosen step, and the alarms.

import { $, el } from "../shared/dom.js";
import { counted, headName, whole } from "../shared/words.js";
import { alarmText } from "./marks.js";
import { RUN_NAMES, chosenColumn, columnAt, data, difference, everyAlarm, heads, runs, shown, state } from "./run.js";
import { errorText, signedText, stepText, written } from "./scale.js";

const MOST_ALARMS = 200;

/** A value of the chosen head in a run at a step; NaN if it was not recorded then. */
function figureAt(run, key, step, kind = "values") {
  const column = columnAt(run.columns, step);
  return column < 0 ? NaN : run[kind].get(key)?.[state.head * run.columns.length + column];
}

export function drawFigures() {
  const { columns } = shown();
  const column = columns[chosenColumn(columns)];
  $("step-title").textContent = `At ${stepText(column)}`;
  const names = runs.length > 1 ? ["A", "B", "B − A"] : ["this head", el("span", { class: "hidden" }, "standard error"), "median of all"];
  $("figures").tHead.rows[0].replaceChildren(el("th", { scope: "col", class: "words" }, "statistic"), ...names.map((name) => el("th", { scope: "col" }, name)));
  $("figures").tBodies[0].replaceChildren(...data.statistics.map((statistic) => {
    const button = el("button", { type: "button", class: "plain", "aria-pressed": String(statistic.key === state.statistic), title: statistic.title }, statistic.short);
    const cells = runs.length > 1 ? pairCells(statistic.key, column) : ownCells(statistic.key, column);
    return el("tr", { "data-key": statistic.key }, el("th", { scope: "row", class: "words" }, button), ...cells.map((text) => el("td", {}, text)));
  }));
}

function ownCells(key, column) {
  const [run] = runs;
  const place = run.columns.indexOf(column);
  const at = (kind) => figureAt(run, key, column.middle, kind);
  const value = at("values");
  return [written(value), Number.isFinite(value) ? errorText(at("errors")) : "", written(run.crowd[key][1][place] ?? NaN)];
}

function pairCells(key, column) {
  const [a, b] = runs.map((run) => figureAt(run, key, column.middle));
  return [written(a), written(b), signedText(difference(a ?? NaN, b ?? NaN))];
}

// --- alarms ------------------------------------------------------------------------------------

/** Numbers in order, with ranges: `29–31, 40`. */
function ranges(numbers) {
  const parts = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (parts.length && parts.at(-1)[1] === number - 1) parts.at(-1)[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

/** Lists each rule that was broken, with the layers, the number of heads and the first step. */
function drawRules(all) {
  const rules = new Map();
  for (const alarm of all) {
    const name = (runs.length > 1 ? `${RUN_NAMES[alarm.number]}: ` : "") + alarm.rule;
    const known = rules.get(name) ?? { heads: new Set(), first: alarm.step };
    known.heads.add(alarm.head);
    known.first = Math.min(known.first, alarm.step);
    rules.set(name, known);
  }
  $("rules").replaceChildren(...[...rules].map(([name, { heads: some, first }]) =>
    el("li", {}, el("b", {}, name), `: ${groupText(some)}, from step ${whole(first)}`)));
}

function groupText(some) {
  const layers = new Set([...some].map((head) => heads[head].layer));
  return `layer${layers.size === 1 ? "" : "s"} ${ranges(layers)}, ${counted(some.size, "head")}`;
}

const alarmsInOrder = () => everyAlarm().sort((a, b) => a.step - b.step);

export function drawAlarms() {
  const all = alarmsInOrder();
  drawRules(all);
  $("alarms-box").hidden = !all.length;
  $("alarms-rest").textContent = all.length === 0 ? "No head broke a rule."
    : all.length > MOST_ALARMS ? `The first ${MOST_ALARMS} of ${whole(all.length)}; the history has all alarms.` : "";
  const names = ["step", ...(runs.length > 1 ? ["run"] : []), "head", "metric", "rule"];
  $("alarms").tHead.rows[0].replaceChildren(...names.map((name) => el("th", { scope: "col", class: name === "rule" ? "words" : "" }, name)));
  $("alarms").tBodies[0].replaceChildren(...all.slice(0, MOST_ALARMS).map((alarm) => {
    const button = el("button", { type: "button", "aria-label": `Step ${whole(alarm.step)}, ${headName(heads[alarm.head])}` }, whole(alarm.step));
    return el("tr", {}, el("th", { scope: "row" }, button), ...(runs.length > 1 ? [el("td", {}, RUN_NAMES[alarm.number])] : []),
      el("td", { title: heads[alarm.head].module }, headName(heads[alarm.head])), el("td", {}, `${alarm.statistic} ${written(alarm.value)}`),
      el("td", { class: "words" }, alarm.rule));
  }));
}

/** The alarms of the chosen head. */
export function drawHeadAlarms() {
  const mine = everyAlarm().filter(({ head }) => head === state.head).slice(0, 6);
  $("head-alarms").replaceChildren(...mine.map((alarm) =>
    el("li", {}, el("b", {}, `${runs.length > 1 ? `${RUN_NAMES[alarm.number]}, ` : ""}step ${whole(alarm.step)}`), `: ${alarmText(alarm)}`)));
}

/** Connects the buttons: `showStatistic` is called with a key, `showAlarm` with an alarm. */
export function connectTables(showStatistic, showAlarm) {
  $("figures").addEventListener("click", ({ target }) => {
    if (!target.closest("button")) return;
    showStatistic(target.closest("tr").dataset.key);
    $("figures").querySelector("[aria-pressed=true]").focus();
  });
  $("alarms").addEventListener("click", ({ target }) => {
    const row = target.closest("button")?.closest("tr");
    if (row) showAlarm(alarmsInOrder()[row.sectionRowIndex]);
  });
}
