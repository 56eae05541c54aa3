// What is chosen, and the views there are.

import { headName } from "../shared/words.js";
import { data } from "./look.js";

export const state = {
  view: "heads", run: 0, row: 0, token: 0,
  on: "text",           // or "repeats": a short piece of repeated random tokens
  direction: "to",      // of the text: "to" where the token looks, "from" who looks at it, "all" received
  scope: "head",        // of the text: the head, or all heads of its layer
  statistic: "label", scale: "root", only: "", filter: "", ranges: undefined,
  settled: false,       // whether a token or a piece was asked for; until then each head shows its own best
};
/** @type {Record<string, View>} */
export const views = {};       // name → { title, there(), load(), draw(loaded), more }, in the order of the bar
export const embedded = location.protocol === "about:";  // in a frame of a notebook, which has no address of its own
export const chosen = () => data.rows[state.row];
export const savedName = () => headName(chosen());  // of saved pictures
export const shownViews = () => Object.entries(views).filter(([, view]) => view.there?.() ?? true);

/**
 * A head's layer on what is looked at: the text, or where there is one, the random piece.
 * @param {Row} row
 */
export const sceneOf = (row, on = state.on) => (on === "repeats" && row.of.twin) || row.of;

/**
 * On what a head's first label is proved: repeated random tokens where its figure is of them, else the text.
 * @param {Row} row
 */
export const proofPiece = (row) => (row.of.twin && row.labels[0]?.key.endsWith("_random") ? "repeats" : "text");

/** The stream that the chosen token is of. */
export const chosenStream = () => (state.direction === "to" ? sceneOf(chosen()).from : sceneOf(chosen()).to);

/** The chosen token as a query, where it is one. */
export const chosenQuery = () => (state.direction === "to" || chosen().of.kind === "self" ? state.token : -1);
export const rowAt = (layer, head) => data.places.get(`${layer}.${head}`) ?? -1;
