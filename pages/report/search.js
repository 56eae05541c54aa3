// The search field and buttons of the bar, and keyboard shortcuts.

import { $ } from "../shared/dom.js";
import { hideTip } from "../shared/tip.js";
import { parseHead, whole } from "../shared/words.js";
import { follow } from "./address.js";
import { drawNav, showView } from "./bar.js";
import { choose, chooseToken, redraw, remember, showRun } from "./choice.js";
import { drawHeader } from "./header.js";
import { data } from "./look.js";
import { chosen, embedded, rowAt, sceneOf, state } from "./state.js";
import { columnNamed, condition } from "./table.js";
import { tokenName } from "./words.js";

const searching = { text: "", found: [], at: -1 };

/**
 * Heads, metrics and tokens that match a word: `L5H3`, `induction`, `entropy<1`, `entropy`, `it`.
 * @returns {{ row?: number, token?: number, on?: string, metric?: string }[]}
 */
function searchWord(word) {
  const head = parseHead(word);
  if (head && rowAt(head.layer, head.head) >= 0) return [{ row: rowAt(head.layer, head.head) }];
  const rowsWith = (test) => [...data.rows.keys()].filter((row) => data.rows[row].labels.some(({ label }) => test(label)));
  const low = word.toLowerCase();
  const heads = data.labels.some((name) => name === low) ? rowsWith((name) => name === low) : [];
  if (heads.length) return heads.map((row) => ({ row }));
  const test = /[<>]/.test(word) ? condition(low.replace(/\s+/g, "")) : undefined;
  if (test) return [...data.rows.keys()].filter((row) => test(data.rows[row])).map((row) => ({ row }));
  const named = (on, test) => {
    const { from } = sceneOf(chosen(), on);
    return [...from.tokens.keys()].filter((index) => test(tokenName(from, index).replace(/^·+/, "").toLowerCase())).map((token) => ({ token, on }));
  };
  const token = (test) => ["text", "repeats"].map((on) => named(on, test)).find(({ length }) => length);
  const metric = columnNamed(low.replace(/\W+/g, "_"));
  return token((name) => name === low) ?? (metric ? [{ metric }] : token((name) => name.includes(low)))
    ?? rowsWith((name) => name.startsWith(low)).map((row) => ({ row }));
}

/** Goes to the first match of the search or, if it is repeated, to the next one. `L5H3 it` names a head, then a token. */
async function search() {
  const text = $("search").value.trim();
  if (!text) return;
  const [first, ...rest] = text.split(/\s+/);
  if (text !== searching.text || !searching.found.length) {
    let found = searchWord(text);
    const head = rest.length ? searchWord(first)[0]?.row : undefined;
    if (!found.length && head !== undefined) {
      await choose(head);
      found = searchWord(rest.join(" "));
    }
    Object.assign(searching, { text, found, at: -1 });
  }
  const { found } = searching;
  $("found-by-search").textContent = found.length ? "" : "not found";
  if (!found.length) return;
  searching.at = (searching.at + 1) % found.length;
  $("found-by-search").textContent = found.length > 1 ? `${searching.at + 1} of ${found.length}` : "";
  const { row, token, on, metric } = found[searching.at];
  if (metric) { state.view = "heads"; showView(); state.statistic = metric; remember(); await redraw(); return; }
  if (row !== undefined) { await choose(row); return; }
  if (!["heads", "head"].includes(state.view)) { state.view = "head"; showView(); }
  if (sceneOf(chosen(), on) !== sceneOf(chosen())) Object.assign(state, { on, ranges: undefined });
  await chooseToken(token, "to");
}

/** Shows, while a word is typed, how many heads, metrics or tokens match it. */
function sayFound() {
  searching.text = "";
  const text = $("search").value.trim();
  const { length } = text ? searchWord(text) : [];
  $("found-by-search").textContent = length ? `${whole(length)} found; press Enter` : "";
}

/** Shows the view and choices that an address gives. */
function goTo(hash) {
  const before = data;
  const up = scrollY > $("views").offsetTop;  // then scroll so that the new view starts right below the sticky bar
  follow(hash);
  if (data !== before) { drawHeader(); drawNav(showRun); }
  showView();
  remember();
  hideTip();
  if (up) scrollTo({ top: $("views").offsetTop - $("bar").offsetHeight });
  redraw();
}

export function connectBar() {
  $("previous-head").addEventListener("click", () => choose((state.row || data.rows.length) - 1));
  $("next-head").addEventListener("click", () => choose((state.row + 1) % data.rows.length));
  $("search-form").addEventListener("submit", (event) => { event.preventDefault(); search(); });
  $("search").addEventListener("input", sayFound);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") $("more").open = false;
    if (event.key !== "/" || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    $("search").focus();
  });
  addEventListener("click", ({ target }) => { if (!target.closest("#more")) $("more").open = false; });
  addEventListener("hashchange", () => goTo(location.hash));
  if (embedded) {
    addEventListener("click", (event) => {
      const link = event.target.closest('a[href^="#"]');
      if (!link) return;
      event.preventDefault();
      goTo(link.getAttribute("href"));
    });
  }
}
