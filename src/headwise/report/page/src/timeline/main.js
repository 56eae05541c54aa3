// The start, the choice and the address that keeps it, and reading the file anew while a training runs.

// --- the choice --------------------------------------------------------------------------------

/** Keeps the choice in the address. */
function remember() {
  const { columns } = shown();
  const found = new URLSearchParams({ statistic: state.statistic, head: headShort(heads[state.head]) });
  if (state.step !== Infinity) found.set("step", String(columns[chosenColumn(columns)].first));
  if (state.layer >= 0) found.set("layer", String(state.layer));
  if (runs.length > 1) found.set("run", state.run === DIFFERENCE ? state.run : RUN_NAMES[state.run]);
  if (state.scale) found.set("scale", state.scale);
  if (data.reread && !$("follow").checked) found.set("follow", "no");
  history.replaceState(history.state, "", `#${found}`);
}

/** Follows an address; of one that `remember` did not write, only what is there is taken. */
function follow(hash) {
  const found = new URLSearchParams(hash.slice(1));
  if (!statisticOf(found.get("statistic"))) return;
  Object.assign(state, { statistic: found.get("statistic"), step: Infinity, layer: -1, scale: "" });
  const head = heads.findIndex((one) => headShort(one) === found.get("head"));
  if (head >= 0) state.head = head;
  if (/^\d+$/.test(found.get("step") ?? "")) state.step = Number(found.get("step"));
  if (/^\d+$/.test(found.get("layer") ?? "") && data.layers[found.get("layer")]) state.layer = Number(found.get("layer"));
  const run = found.get("run") === DIFFERENCE ? DIFFERENCE : String(RUN_NAMES.indexOf(found.get("run")));
  if (run === DIFFERENCE ? canDiffer() : runs[run]) state.run = run;
  if (["linear", "log"].includes(found.get("scale"))) state.scale = found.get("scale");
  if (found.get("follow") === "no") $("follow").checked = false;
}

const canDiffer = () => runs.length > 1 && runs.both.columns.length > 0;

/** Makes a head and a column the chosen ones. */
function choose(head, column) {
  const { columns } = shown();
  state.head = head;
  state.step = column === columns.length - 1 ? Infinity : columns[column].middle;
  if (state.layer >= 0 && heads[head].layer !== state.layer) {
    state.layer = heads[head].layer;
    return drawAll();
  }
  drawChoice();
  drawHead();
  announce();
}

function showStatistic(key) {
  state.statistic = key;
  drawAll();
}

/** Tells listeners what is chosen. */
function announce() {
  const [{ columns, values }, statistic] = [shown(), statisticOf()];
  const column = chosenColumn(columns);
  $("said").textContent = `${headName(heads[state.head])}, ${stepText(columns[column])}: ${statistic.title} ${shownText(values[state.head * columns.length + column])}`;
}

// --- drawing -----------------------------------------------------------------------------------

/** Draws what follows from the chosen head. */
function drawHead() {
  $("bar-head").textContent = headName(heads[state.head]);
  $("head-title").textContent = headName(heads[state.head]);
  $("head-module").textContent = heads[state.head].module || "the model itself";
  drawCurve();
  drawFigures();
  drawHeadAlarms();
  remember();
}

function drawAll() {
  if (!$("heat").clientWidth) return;  // a window without a width
  const statistic = statisticOf();
  const on = { statistic: state.statistic, run: state.run, scale: scaleOf(statistic) };
  for (const [name, value] of Object.entries(on)) {
    for (const input of document.getElementsByName(name)) input.checked = input.value === value;
  }
  $("scale").hidden = !canLog(statistic);
  $("layer").value = String(state.layer);
  $("what").replaceChildren(el("b", {}, `${statistic.title}${state.run === DIFFERENCE ? ", B − A" : ""}. `), statistic.meaning);
  drawHeat();
  drawHead();
}

function drawSwitches() {
  switches($("statistics"), "statistic", data.statistics.map(({ key, short, title }) => [key, short, title]), state.statistic, showStatistic);
  const names = runs.map((run, place) => [String(place), RUN_NAMES[place], `${RUN_NAMES[place]}: ${run.name}`]);
  if (canDiffer()) names.push([DIFFERENCE, "B − A", "B less A, at the steps that both have recorded"]);
  switches($("run"), "run", names, state.run, (key) => { state.run = key; drawAll(); });
  $("run").hidden = runs.length === 1;
  switches($("scale"), "scale", [["linear", "linear"], ["log", "logarithm"]], "linear", (key) => { state.scale = key; drawAll(); });
}

function drawOnce() {
  $("name").textContent = runs.length > 1 ? runs.map(({ name }, place) => `${RUN_NAMES[place]}: ${name}`).join(" · ") : runs[0].name;
  const fact = (value, what) => el("li", {}, el("b", {}, value), ` ${what}`);
  const alarms = everyAlarm();
  const alarmed = new Set(alarms.map(({ head }) => head)).size;
  $("facts").replaceChildren(
    fact(whole(heads.length), `head${heads.length === 1 ? "" : "s"} in ${counted(data.layers.length, "layer")}`),
    ...runs.map((run, place) => fact(`${whole(run.first[0])} to ${whole(run.last.at(-1))}`,
      `steps${runs.length > 1 ? ` of ${RUN_NAMES[place]}` : ""}, ${whole(run.count.reduce((sum, count) => sum + count, 0))} recorded`)),
    fact(whole(alarms.length), `alarm${alarms.length === 1 ? "" : "s"}${alarmed ? ` of ${counted(alarmed, "head")}` : ""}`),
  );
  const notes = data.left_out.map((text) => `Left out: ${text}.`);
  if (runs.length > 1 && !canDiffer()) {
    notes.push(`A and B have no ${runs.some(({ count }) => count[0] > 1) ? "column of the same steps" : "recorded step"} in common, so there is no difference.`);
  }
  $("notice").hidden = !notes.length;
  $("notice").textContent = notes.join(" ");
  $("layer").replaceChildren(el("option", { value: "-1" }, "all layers"),
    ...data.layers.map(([module, count], layer) => el("option", { value: layer }, `layer ${layer}${module ? `: ${module}` : ""} (${count})`)));
  const lines = (made) => made.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  $("made").replaceChildren(...runs.flatMap((run, place) => [
    ...(runs.length > 1 ? [el("dt", {}, el("b", {}, RUN_NAMES[place])), el("dd", {})] : []), ...lines(run.made)]));
  drawSwitches();
  drawAlarms();
}

/** What to show first: the first alarm, else what the newest step has. */
function beginning() {
  state.statistic = data.statistics[0].key;
  const [first] = everyAlarm().sort((a, b) => a.step - b.step);
  if (first) {
    [state.head, state.step] = [first.head, first.step];
    if (statisticOf(first.statistic)) state.statistic = first.statistic;
  }
  if (canDiffer()) state.run = DIFFERENCE;
}

function connect() {
  connectHeat();
  connectCurve();
  const turn = (by) => choose((state.head + by + heads.length) % heads.length, chosenColumn());
  $("previous-head").addEventListener("click", () => turn(-1));
  $("next-head").addEventListener("click", () => turn(1));
  $("layer").addEventListener("change", () => {
    state.layer = Number($("layer").value);
    if (state.layer >= 0 && heads[state.head].layer !== state.layer) state.head = shownHeads()[0];
    drawAll();
  });
  addEventListener("hashchange", () => { follow(location.hash); drawAll(); });
  addEventListener("scroll", hideTip, { passive: true });
  dark.addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    requestAnimationFrame(drawAll);
  });
}

// --- a training that goes on -------------------------------------------------------------------

const LONGEST = 300;  // seconds between two readings of a file that does not change
let touched = 0;      // when somebody last did something here

/** Reads the file anew every so many seconds, unless somebody is busy with the page or has left it. */
function keepReading() {
  const { every, written: when } = data.reread;
  const { when: before, wait: waited, scroll, focus } = history.state ?? {};
  const wait = scroll !== undefined && before === when ? Math.min(2 * waited, LONGEST) : every;
  history.replaceState({ when, wait }, "", location.hash);
  if (scroll) scrollTo({ top: scroll });
  if (focus) $(focus)?.focus({ preventScroll: true });
  $("live").hidden = false;
  $("live-what").textContent = `written ${new Date(when * 1000).toLocaleTimeString("en-GB")}, read anew every ${every} s`;
  $("follow").addEventListener("change", remember);
  for (const name of ["pointermove", "pointerdown", "keydown", "wheel", "touchmove"]) {
    addEventListener(name, () => { touched = Date.now(); }, { passive: true });
  }
  const due = Date.now() + wait * 1000;
  setInterval(() => {
    const busy = Date.now() - touched < 3000 || document.hidden || String(getSelection());
    if (Date.now() < due || busy || !$("follow").checked) return;
    history.replaceState({ when, wait, scroll: scrollY, focus: document.activeElement?.id ?? "" }, "", location.hash);
    location.reload();
  }, 250);
}

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for the page; any of 2023 or later will do");
  await prepareRuns(JSON.parse(await unpackText("results")));
  $("follow").checked = true;
  beginning();
  follow(location.hash);
  drawOnce();
  drawAll();
  connect();
  if (data.reread) keepReading();
  $("every-head").setAttribute("aria-busy", "false");
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  $("fault").hidden = false;
  $("fault").textContent = `The page could not be drawn: ${error.message}`;
  console.error(error);
});
