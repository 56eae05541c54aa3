// Choosing a head, a token, an input or a run, and redrawing the view.

import { $, showError } from "../shared/dom.js";
import { headName } from "../shared/words.js";
import { address } from "./address.js";
import { drawBar, drawNav, showView } from "./bar.js";
import { drawHeader } from "./header.js";
import { allLabels, data, showData } from "./look.js";
import { chosen, chosenStream, embedded, proofPiece, sceneOf, shownViews, state, views } from "./state.js";
import { tellingToken } from "./telling.js";
import { headRows } from "./weights.js";

let turn = 0;           // counts redraws, so that a slow one never replaces a newer one

/** Draws the current view. Everything that it shows is determined by `data` and `state`. */
export async function redraw() {
  const mine = ++turn;
  const view = views[state.view];
  $("views").setAttribute("aria-busy", "true");
  try {
    const loaded = await view.load?.();
    if (mine !== turn) return;
    const focusAgain = heldFocus();
    view.draw(loaded);
    focusAgain();
    $("views").setAttribute("aria-busy", "false");
  } catch (error) {
    showError(error);
  }
}

/** Returns a function that, once a list is rebuilt, focuses the button in the place of the one that had focus. */
function heldFocus() {
  const held = document.activeElement;
  const list = held.closest("ol[id], ul[id], table[id]");
  const place = list ? [...list.querySelectorAll("button")].indexOf(held) : -1;
  return () => {
    if (place < 0 || held.isConnected) return;
    const buttons = [...list.querySelectorAll("button")];
    (buttons[place] ?? buttons.at(-1))?.focus({ preventScroll: true });
  };
}

/** Stores the current choices in the address and in the bar's links. */
export function remember() {
  if (!embedded) history.replaceState(null, "", address(state.view));
  for (const link of $("nav").querySelectorAll("a")) link.setAttribute("href", address(link.dataset.view));
  drawBar();
}

/** Chooses the head of row `index` in the current view; does nothing for −1 and undefined. */
export function choose(index) {
  if (!(index >= 0)) return Promise.resolve();
  const before = sceneOf(chosen());
  state.row = index;
  if (!state.settled) state.on = proofPiece(chosen());
  const after = sceneOf(chosen());
  if (before.from !== after.from || before.to !== after.to) {
    state.ranges = undefined;
    if (state.direction === "all" || before.from !== after.from) state.direction = "to";
    state.token = Math.min(state.token, after.from.tokens.length - 1);
  } else if (before.rows.cells !== after.rows.cells || before.cols.cells !== after.cols.cells) state.ranges = undefined;
  $("said").textContent = `${headName(chosen())}: ${allLabels(chosen())}`;
  if (!state.settled) return tellBest();
  remember();
  return redraw();
}

/** Shows the chosen head at the token that illustrates it best. */
export async function tellBest() {
  const row = chosen();
  state.direction = "to";
  remember();
  $("views").setAttribute("aria-busy", "true");
  const token = tellingToken(row, await headRows(row));
  if (row !== chosen()) return;
  state.token = token;
  remember();
  await redraw();
}

/** Chooses a token: a query if direction is "to", otherwise a key. */
export function chooseToken(index, direction = state.direction) {
  state.settled = true;
  state.direction = direction;
  state.token = Math.max(0, Math.min(chosenStream().tokens.length - 1, index));
  remember();
  return redraw();
}

/** Switches to the text or to repeated random tokens, at the token there that illustrates the head best. */
export function lookOn(on) {
  Object.assign(state, { on, ranges: undefined, settled: true });
  return tellBest();
}

/** Shows one of the two looks, with the same head chosen if it has one. */
export function showRun(index) {
  const { module, head } = chosen();
  state.run = index;
  showData(index);
  state.row = data.byName.get(`${module}.${head}`) ?? 0;
  [state.ranges, state.direction, state.only] = [undefined, "to", ""];
  state.token = Math.min(state.token, chosenStream().tokens.length - 1);
  if (!data.column.has(state.statistic)) state.statistic = "label";
  drawHeader();
  drawNav(showRun);
  if (!shownViews().some(([name]) => name === state.view)) state.view = "heads";
  showView();
  remember();
  return redraw();
}
