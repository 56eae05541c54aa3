// The page address, which stores the current choices.

import { headName, parseHead } from "../shared/words.js";
import { data, runs, showData } from "./look.js";
import { chosen, chosenStream, rowAt, sceneOf, shownViews, state, views } from "./state.js";

/** The choices that an address stores besides view, head and token, if they differ from the start: name → [read, write]. */
const KEPT = {
  run: [() => String(state.run), (value) => { if (runs[value]) showData(state.run = Number(value)); }],
  on: [() => state.on, (value) => oneOf("on", value, ["text", "repeats"])],
  direction: [() => state.direction, (value) => oneOf("direction", value, ["to", "from", "all"])],
  scope: [() => state.scope, (value) => oneOf("scope", value, ["head", "layer"])],
  statistic: [() => state.statistic, (value) => oneOf("statistic", value, ["label", ...data.column.keys()])],
  scale: [() => state.scale, (value) => oneOf("scale", value, ["root", "linear", "row"])],
  zoom: [() => zoomWords(), (value) => { state.ranges = zoomRanges(value); }],
  label: [() => state.only, (value) => oneOf("only", value, data.labels)],
  filter: [() => state.filter, (value) => { state.filter = value; }],
};
/** The same choices, and those in the `kept` field of each view. */
export const allKept = () => [KEPT, ...Object.values(views).map(({ kept = {} }) => kept)].flatMap(Object.entries);

export const START = {};       // the choices at the start, which an address leaves out

/** The zoomed range of a head's map as `2_8_10_16`: first and last key, then first and last query, in cells. */
function zoomWords() {
  if (!state.ranges) return "";
  const { xaxis, yaxis: [last, first] } = state.ranges;
  return [...xaxis, first, last].map((end) => +end.toFixed(2)).join("_");
}

function zoomRanges(text) {
  const [left, right, first, last] = text.split("_").map(Number);
  return left >= -0.5 && right > left && first >= -0.5 && last > first ? { xaxis: [left, right], yaxis: [last, first] } : undefined;
}

function oneOf(name, value, allowed) {
  if (allowed.includes(value)) state[name] = value;
}

/** The address of a view with the current choices. */
export function address(view) {
  const kept = new URLSearchParams();
  for (const [name, [read]] of allKept()) if (read() !== START[name]) kept.set(name, read());
  if (runs.length > 1) kept.set("of", runs.map(({ title }) => title).join(" → "));  // for people who read the link
  return `#${view}/${headName(chosen())}/${state.token}${kept.size ? `?${kept}` : ""}`;
}

const OLD_NAMES = { text: "head" };  // names of views in addresses from earlier versions

/** Applies an address such as `#head/L3H5/12?scale=row`: view, head, token and other choices. */
export function follow(hash) {
  const [, named, name, token, rest] = hash.match(/^#(\w+)(?:\/(L\d+H\d+|\d+\.\d+))?(?:\/(\d+))?(?:\?(.*))?$/i) ?? [];
  const head = parseHead(name ?? "");
  const view = OLD_NAMES[named] ?? named;
  const kept = new URLSearchParams(rest ?? "");
  const before = [state.on, state.token].join();
  if (head) for (const [name, [, write]] of allKept()) write(kept.get(name) ?? START[name]);
  if (shownViews().some(([name]) => name === view)) state.view = view;
  const index = head ? rowAt(head.layer, head.head) : -1;
  if (index >= 0) state.row = index;
  if (token !== undefined) state.token = Number(token);
  state.token = Math.min(state.token, chosenStream().tokens.length - 1);
  const { rows, cols } = sceneOf(chosen());
  if (state.ranges && (state.ranges.xaxis[1] > cols.cells || state.ranges.yaxis[0] > rows.cells)) state.ranges = undefined;
  if (token !== undefined && [state.on, state.token].join() !== before) state.settled = true;
}
