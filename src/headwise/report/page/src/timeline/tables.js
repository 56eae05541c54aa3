// Figures of the chosen head at the chosen step, and alarms.

const MOST_ALARMS = 200;
const RUN_NAMES = ["A", "B"];

/** A figure of the chosen head in a run at a step; NaN where it was not recorded there. */
function figureAt(run, key, step, kind = "values") {
  const column = columnAt(run.columns, step);
  return column < 0 ? NaN : run[kind].get(key)?.[state.head * run.columns.length + column];
}

function drawFigures() {
  const { columns } = shown();
  const column = columns[chosenColumn(columns)];
  $("step-title").textContent = `At ${stepText(column)}`;
  const names = runs.length > 1 ? ["A", "B", "B − A"] : ["this head", el("span", { class: "hidden" }, "standard error"), "median of all"];
  $("figures").tHead.rows[0].replaceChildren(el("th", { scope: "col", class: "words" }, "statistic"), ...names.map((name) => el("th", { scope: "col" }, name)));
  $("figures").tBodies[0].replaceChildren(...data.statistics.map((statistic) => {
    const button = el("button", { type: "button", class: "plain", "aria-pressed": String(statistic.key === state.statistic), title: statistic.title }, statistic.short);
    button.addEventListener("click", () => {
      showStatistic(statistic.key);
      $("figures").querySelector("[aria-pressed=true]").focus();
    });
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

const everyAlarm = () => runs.flatMap((run, number) => run.alarms.map((alarm) => ({ ...alarm, number })));

/** Each rule that was broken: by how many heads, when first. */
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
    el("li", {}, el("b", {}, name), `: ${counted(some.size, "head")}, first at step ${whole(first)}`)));
}

function drawAlarms() {
  const all = everyAlarm().sort((a, b) => a.step - b.step);
  drawRules(all);
  $("alarms-box").hidden = !all.length;
  $("alarms-rest").textContent = all.length === 0 ? "No head broke a rule."
    : all.length > MOST_ALARMS ? `The first ${MOST_ALARMS} of ${whole(all.length)}; the history has all.` : "";
  const names = ["step", ...(runs.length > 1 ? ["run"] : []), "head", "figure", "rule"];
  $("alarms").tHead.rows[0].replaceChildren(...names.map((name) => el("th", { scope: "col", class: name === "rule" ? "words" : "" }, name)));
  $("alarms").tBodies[0].replaceChildren(...all.slice(0, MOST_ALARMS).map((alarm) => {
    const button = el("button", { type: "button", "aria-label": `Step ${whole(alarm.step)}, ${headName(heads[alarm.head])}` }, whole(alarm.step));
    button.addEventListener("click", () => showAlarm(alarm));
    return el("tr", {}, el("th", { scope: "row" }, button), ...(runs.length > 1 ? [el("td", {}, RUN_NAMES[alarm.number])] : []),
      el("td", { title: heads[alarm.head].module }, headShort(heads[alarm.head])), el("td", {}, `${alarm.statistic} ${written(alarm.value)}`),
      el("td", { class: "words" }, alarm.rule));
  }));
}

/** Shows the head, the step and the statistic of an alarm. */
function showAlarm({ step, head, statistic, number }) {
  if (statisticOf(statistic)) state.statistic = statistic;
  if (runs.length > 1 && state.run !== String(number)) state.run = String(number);
  if (state.layer >= 0 && heads[head].layer !== state.layer) state.layer = -1;
  [state.head, state.step] = [head, step];
  drawAll();
  announce();
}

/** The alarms of the chosen head. */
function drawHeadAlarms() {
  const mine = everyAlarm().filter(({ head }) => head === state.head).slice(0, 6);
  $("head-alarms").replaceChildren(...mine.map((alarm) =>
    el("li", {}, el("b", {}, `${runs.length > 1 ? `${RUN_NAMES[alarm.number]}, ` : ""}step ${whole(alarm.step)}`), `: ${alarmText(alarm)}`)));
}
