// The story of a head: the text with arcs from a token to the keys that it attends to, and one sentence that describes them.

import { $, el, switches } from "../shared/dom.js";
import { headName } from "../shared/words.js";
import { address } from "./address.js";
import { drawArcs, layText } from "./arcs.js";
import { chooseToken, lookOn } from "./choice.js";
import { labelLines } from "./labels.js";
import { data } from "./look.js";
import { drawMap, fullColor, scaleWords } from "./map.js";
import { guideWords, guidesOf } from "./proof.js";
import { sentence } from "./sentence.js";
import { chosen, proofPiece, sceneOf, state } from "./state.js";
import { tellingToken } from "./telling.js";
import { rawWords } from "./text.js";
import { headRows, strongest, tokenWeights } from "./weights.js";

let told = {};       // what the story shows: { row, token, rows }
let peeks = 0;       // counts previews, so that a slow one never replaces a newer one

/**
 * Shows the story of a head or token while the pointer is on it; without either, the story of the chosen head and token.
 * @param {{ row?: number, token?: number }} at
 */
export async function peek({ row = state.row, token }) {
  if (row < 0 || state.view !== "heads") return;
  const head = data.rows[row];
  const free = !state.settled && token === undefined && row !== state.row;  // show the head's best example, because nothing else was chosen
  const layer = free ? sceneOf(head, proofPiece(head)) : sceneOf(head);
  const at = token ?? chosenQueryOf(head);
  if (told.row === head && told.rows.layer === layer && (free || told.token === at)) return;
  const mine = ++peeks;
  const rows = await headRows(head, layer);
  if (mine === peeks && state.view === "heads") drawStory(head, rows, free ? tellingToken(head, rows) : at);
}

/** The chosen token as a query of a head's layer, or its last query if the layer has fewer. */
const chosenQueryOf = (row) => Math.min(state.token, sceneOf(row).from.tokens.length - 1);

/**
 * @param {Row} row
 * @param {HeadRows} rows
 * @param {number} token
 */
export function drawStory(row, rows, token = chosenQueryOf(row)) {
  peeks++;
  const { layer } = rows;
  told = { row, token, rows };
  const preview = row !== chosen();
  $("glance-title").replaceChildren(headName(row), ...(preview ? [" ", el("small", {}, "preview; click to select")] : []));
  $("story").classList.toggle("preview", preview);
  $("glance-labels").replaceChildren(...labelLines(row));
  $("glance-open").setAttribute("href", address("head"));
  drawPieceSwitch("pieces", row, layer.isTwin ? "repeats" : "text");
  const found = strongest(rows, token);
  $("sentence").replaceChildren(...sentence(row, layer, token, found));
  layText($("story-text"), layer, {
    over: (index) => peek({ row: data.rows.indexOf(told.row), token: index }), out: () => peek({}), pick: (index) => chooseToken(index, "to"),
  });
  drawArcs($("story-text"), row, rows, token, found);
  $("story-scale").textContent = scaleWords(fullColor(tokenWeights(rows, token, "to")));
  $("story-raw").textContent = rawWords(layer);
  drawStoryMap(row, rows, token);
  drawAside(row, layer);
}

/**
 * Describes in one sentence what the head does on the input that is not shown.
 * @param {Row} row
 * @param {Layer} layer
 */
async function drawAside(row, { isTwin }) {
  $("aside").hidden = !row.of.twin;
  if (!row.of.twin) return;
  const mine = peeks;
  const rows = await headRows(row, sceneOf(row, isTwin ? "text" : "repeats"));
  if (mine !== peeks) return;
  const token = tellingToken(row, rows);
  $("aside").replaceChildren(el("b", {}, isTwin ? "On the text: " : "On repeated random tokens: "), ...sentence(row, rows.layer, token, strongest(rows, token)));
}

/** Draws the switch between the text and repeated random tokens, if a layer has both. */
export function drawPieceSwitch(id, row, on = state.on) {
  $(id).hidden = !row.of.twin;
  switches($(id), id, [["text", "text"], ["repeats", "repeated random tokens", "A short sequence of repeated random tokens"]],
    on, lookOn);
}

function drawStoryMap(row, { layer, map }, token) {
  const cell = layer.rows.cell(token);
  if (!$("glance-fold").open) { $("guide-what").textContent = ""; return; }
  drawMap("glance", row, layer, map, {
    small: true, ticks: true, guides: guidesOf(row, layer), frames: [{ x0: -0.5, x1: layer.cols.cells - 0.5, y0: cell - 0.5, y1: cell + 0.5, plain: true, width: 1.5 }],
    click: ({ row: query }) => chooseToken(layer.rows.start(query), "to"),
    hover: (_, { row: query }) => peek({ row: data.rows.indexOf(row), token: layer.rows.start(Math.max(0, Math.min(layer.rows.cells - 1, query))) }),
    leave: () => peek({}),
  }).setAttribute("aria-label", `Attention map of ${headName(row)}; the Head view shows it in full`);
  $("guide-what").textContent = guideWords(row, layer, map);
}

export function connectStory() {
  $("glance-fold").addEventListener("toggle", () => { if (told.row && $("glance-fold").open) drawStoryMap(told.row, told.rows, told.token); });
}
