// The current choices, and the available views.

import { headName } from "../shared/words.js";
import { data } from "./look.js";

export const state = {
  view: "heads", run: 0, row: 0, token: 0,
  on: "text",           // or "repeats": a short sequence of repeated random tokens
  direction: "to",      // in the text: "to" what the token attends to, "from" what attends to it, "all" total received
  scope: "head",        // in the text: "head", or "layer" for the mean over all heads of the layer
  statistic: "label", scale: "root", only: "", filter: "", ranges: undefined,
  settled: false,       // true once a token or an input was chosen; until then each head shows its best example
};
/** @type {Record<string, View>} */
export const views = {};       // name → { title, there(), load(), draw(loaded), more }, in the order of the bar
export const embedded = location.protocol === "about:";  // in a frame of a notebook, which does not have its own address
export const chosen = () => data.rows[state.row];
export const savedName = () => headName(chosen());  // for the file names of saved pictures
export const shownViews = () => Object.entries(views).filter(([, view]) => view.there?.() ?? true);

/**
 * A head's layer on the chosen input: the text or, if "repeats" is chosen and available, the repeated random tokens.
 * @param {Row} row
 */
export const sceneOf = (row, on = state.on) => (on === "repeats" && row.of.twin) || row.of;

/**
 * The input that a head's first label is based on: repeated random tokens if its metric uses them, else the text.
 * @param {Row} row
 */
export const proofPiece = (row) => (row.of.twin && row.labels[0]?.key.endsWith("_random") ? "repeats" : "text");

/** The stream that contains the chosen token. */
export const chosenStream = () => (state.direction === "to" ? sceneOf(chosen()).from : sceneOf(chosen()).to);

/** The chosen token if it is a query, else −1. */
export const chosenQuery = () => (state.direction === "to" || chosen().of.kind === "self" ? state.token : -1);
export const rowAt = (layer, head) => data.places.get(`${layer}.${head}`) ?? -1;
