// The bar: views and the chosen head.

import { $, el, switches } from "../shared/dom.js";
import { headInWords, headName } from "../shared/words.js";
import { address } from "./address.js";
import { glyph } from "./labels.js";
import { allLabels, firstLabel, runs } from "./look.js";
import { chosen, shownViews, state, views } from "./state.js";

/** Shows the current view and hides the others. */
export function showView() {
  for (const name of Object.keys(views)) $(`view-${name}`).hidden = name !== state.view;
  for (const link of $("nav").querySelectorAll("a")) {
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if ($("more").open && $("more").contains(document.activeElement)) $("more").querySelector("summary").focus();
  $("more").open = false;
  $("more").classList.toggle("here", Boolean(views[state.view].more));
  document.body.dataset.view = state.view;
  document.title = `${views[state.view].title}: ${document.documentElement.dataset.title}`;
}

/** Draws the links to the views and the switch between runs; `show` is called with the index of a run. */
export function drawNav(show) {
  const link = ([name, { title }]) => el("a", { "data-view": name, href: `#${name}` }, title);
  $("nav").replaceChildren(...shownViews().filter(([, { more }]) => !more).map(link), $("more"));
  $("more-views").replaceChildren(...shownViews().filter(([, { more }]) => more).map(link));
  $("run").hidden = runs.length === 1;
  const names = runs.map((run, index) => [String(index), "AB"[index], `${"AB"[index]}: ${run.title}`]);
  switches($("run"), "run", names, String(state.run), (index) => show(Number(index)));
}

export function drawBar() {
  const row = chosen();
  $("bar-head").textContent = headName(row);
  $("bar-head").setAttribute("href", address("head"));
  $("bar-head").setAttribute("aria-label", `${headName(row)}: ${headInWords(row)}, ${allLabels(row)}; show this head`);
  const more = row.labels.length > 1 ? ` +${row.labels.length - 1}` : "";
  $("bar-label").replaceChildren(glyph(firstLabel(row)), el("span", {}, firstLabel(row) + more));
}

