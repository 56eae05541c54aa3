// Entry point: unpacks the results, and draws the view that the address names.

import { numbers, unpackText } from "../shared/codec.js";
import { $, dark, showError } from "../shared/dom.js";
import { hideTip } from "../shared/tip.js";
import { aboutView } from "./about.js";
import { START, allKept, follow } from "./address.js";
import { drawNav, showView } from "./bar.js";
import { headChanges } from "./changes.js";
import { redraw, remember, showRun } from "./choice.js";
import { compareView, connectCompare } from "./compare.js";
import { compositionView, connectComposition } from "./composition.js";
import { connectHead, headView } from "./head.js";
import { drawHeader } from "./header.js";
import { connectHeads, headsView } from "./heads.js";
import { likenessView } from "./likeness.js";
import { data, runs, setRuns } from "./look.js";
import { mosaicView } from "./mosaic.js";
import { connectScatter, scatterView, startAxes } from "./scatter.js";
import { connectBar } from "./search.js";
import { chosen, embedded, proofPiece, state, views } from "./state.js";
import { connectStory } from "./story.js";
import { connectTable, tableView } from "./table.js";
import { tellingToken } from "./telling.js";
import { headRows } from "./weights.js";

const NARROW = 860;  // pixels, as in the style sheet: up to this width, the story's map starts folded

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for this page; use a version from 2023 or later");
  document.documentElement.dataset.title = document.title;
  Object.assign(views, {
    heads: headsView, head: headView, mosaic: mosaicView, table: tableView, compare: compareView, composition: compositionView, likeness: likenessView,
    scatter: scatterView, about: aboutView,
  });
  setRuns(JSON.parse(await unpackText("results")));
  if (runs.length > 1) state.view = "compare";
  state.row = runs.length > 1 && headChanges().length ? data.rows.indexOf(headChanges()[0].a) : data.opening;
  if (data.rows.every(({ labels }) => !labels.length)) state.statistic = ["ablation", "importance", "entropy"].find((key) => data.column.has(key)) ?? "label";
  startAxes();
  for (const [name, [read]] of allKept()) START[name] = read();
  state.on = runs.length > 1 ? "text" : proofPiece(chosen());
  state.token = tellingToken(chosen(), await headRows(chosen()));
  if (!embedded) follow(location.hash);
  if (innerWidth <= NARROW) $("glance-fold").open = false;
  drawHeader();
  drawNav(showRun);
  showView();
  remember();
  for (const connect of [connectBar, connectHeads, connectStory, connectTable, connectHead, connectScatter, connectCompare, connectComposition]) connect();
  await redraw();
  dark.addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    requestAnimationFrame(redraw);
  });
  addEventListener("scroll", hideTip, { passive: true });
  addEventListener("keydown", hideTip);
  document.documentElement.dataset.ready = "yes";
  (window.requestIdleCallback ?? setTimeout)(unpackAhead);
}

/** Unpacks the data of other views while the page is idle. */
async function unpackAhead() {
  for (const layer of data.layers) await numbers(layer.maps);
  if (data.similarity) await numbers(data.similarity);
}

start().catch(showError);
