// Entry point: unpacks the results, chooses what to show, and draws it.

import { unpackText } from "../shared/codec.js";
import { $, dark, el, showError, switches } from "../shared/dom.js";
import { hideTip } from "../shared/tip.js";
import { counted, whole } from "../shared/words.js";
import { choose, drawAll, follow, showAlarm, showStatistic, zoom } from "./choice.js";
import { connectKeys } from "./heat.js";
import { keepReading } from "./reread.js";
import { DIFFERENCE, RUN_NAMES, canDiffer, chosenColumn, data, everyAlarm, heads, prepareRuns, runs, shownHeads, state, statisticOf } from "./run.js";
import { connectTables, drawAlarms } from "./tables.js";

function drawSwitches() {
  switches($("statistics"), "statistic", data.statistics.map(({ key, short, title }) => [key, short, title]), state.statistic, showStatistic);
  const names = runs.map((run, place) => [String(place), RUN_NAMES[place], `${RUN_NAMES[place]}: ${run.name}`]);
  if (canDiffer()) names.push([DIFFERENCE, "B − A", "B − A at the steps that both runs recorded"]);
  switches($("run"), "run", names, state.run, (key) => { state.run = key; drawAll(); });
  $("run").hidden = runs.length === 1;
  switches($("scale"), "scale", [["linear", "linear"], ["log", "logarithmic"], ["change", "change", "Change since the first step"]], "linear", (key) => { state.scale = key; drawAll(); });
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
    fact(whole(alarms.length), `alarm${alarms.length === 1 ? "" : "s"}${alarmed ? ` in ${counted(alarmed, "head")}` : ""}`),
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

/** Chooses what to show first: the first alarm, else the newest step; and B − A, if there are two runs with common steps. */
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
  connectKeys(choose);
  connectTables(showStatistic, showAlarm);
  const turn = (by) => choose((state.head + by + heads.length) % heads.length, chosenColumn());
  $("previous-head").addEventListener("click", () => turn(-1));
  $("next-head").addEventListener("click", () => turn(1));
  $("layer").addEventListener("change", () => {
    state.layer = Number($("layer").value);
    if (state.layer >= 0 && heads[state.head].layer !== state.layer) state.head = shownHeads()[0];
    drawAll();
  });
  $("sort").addEventListener("change", () => { state.sort = $("sort").value; drawAll(); });
  $("whole").addEventListener("click", () => zoom(undefined));
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

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for this page; use a version from 2023 or later");
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

start().catch(showError);
