// The runs shown, the current choices, and the values of heads over columns for A, B and B − A.

import { numbers } from "../shared/codec.js";

export const DIFFERENCE = "difference";
export const state = { statistic: "", head: 0, step: Infinity, layer: -1, run: "0", scale: "", sort: "layer", zoom: null };
/** @type {Run[] & { both?: { columns: Steps[], pairs: number[][], values: Map<string, Float32Array> } }} */
export let runs = [];   // one run, or A and B; `runs.both` has the columns that both share
/** @type {any} */
export let data;        // the results, with `statistics`, `layers` and how they are written
/** @type {{ layer: number, head: number, module: string }[]} */
export let heads = [];  // { layer, head, module }, in the order of all arrays

/** The steps and the values of a run's scalars, such as the loss: `[name, steps, values][]`, the loss first. */
export const scalarsOf = (run) => Object.entries(run.scalars).map(([name, [steps, values]]) => [name, steps, values])
  .sort(([a], [b]) => Number(b === "loss") - Number(a === "loss") || (a < b ? -1 : 1));

/** Unpacks the values of all runs, and adds the data that charts need. */
export async function prepareRuns(found) {
  data = found;
  runs = data.runs;
  heads = data.layers.flatMap(([module, count], layer) => Array.from({ length: count }, (_, head) => ({ layer, head, module })));
  for (const run of runs) {
    for (const kind of ["values", "errors"]) {
      const unpacked = new Map();
      for (const [key, grid] of Object.entries(run[kind])) unpacked.set(key, (await numbers(grid)).values);
      run[kind] = unpacked;
    }
    run.columns = columnsOf(run.first, run.last, run.count);
    run.alarms = alarmsOf(/** @type {any} */ (run.alarms));
  }
  if (runs.length === 2) runs.both = bothColumns(...runs.map(({ columns }) => columns));
}

/**
 * Alarm objects from parallel lists of steps, heads and so on.
 * @returns {Alarm[]}
 */
const alarmsOf = (lists) => lists.step.map((_, place) => Object.fromEntries(Object.entries(lists).map(([key, all]) => [key, all[place]])));

/** Columns with the steps that they cover and their edges on the step axis. */
function columnsOf(first, last, count) {
  const middle = first.map((step, place) => (step + last[place]) / 2);
  const gaps = middle.slice(1).map((step, place) => step - middle[place]).sort((a, b) => a - b);
  const usual = gaps.length ? gaps[gaps.length >> 1] : 1;  // a column extends at most this far, so wider gaps stay empty
  const half = (place, side) => Math.min(Math.abs((middle[place + side] ?? middle[place] + usual) - middle[place]) / 2, usual);
  return first.map((step, place) => ({
    first: step, last: last[place], count: count[place], middle: middle[place],
    from: Math.max(0, middle[place] - half(place, -1)), to: middle[place] + half(place, 1),
  }));
}

/** The columns that A and B share, each with its index in both. */
function bothColumns(a, b) {
  const name = ({ first, last, count }) => `${first} ${last} ${count}`;
  const place = new Map(b.map((column, index) => [name(column), index]));
  const pairs = a.map((column, index) => [index, place.get(name(column))]).filter(([, other]) => other !== undefined);
  const columns = columnsOf(...["first", "last", "count"].map((key) => pairs.map(([index]) => a[index][key])));
  return { columns, pairs, values: new Map() };
}

export const isShare = (statistic) => statistic.unit === "share";
/** @returns {Statistic | undefined} */
export const statisticOf = (key = state.statistic) => data.statistics.find((one) => one.key === key);

/** The data shown for a statistic: its columns and its values `[heads × columns]`. */
export function shown(key = state.statistic) {
  if (state.run !== DIFFERENCE) return { columns: runs[state.run].columns, values: runs[state.run].values.get(key) };
  const { columns, pairs, values } = runs.both;
  if (!values.has(key)) {
    const [a, b] = runs.map((run) => run.values.get(key));
    const [wide, wideB] = runs.map((run) => run.columns.length);
    const change = new Float32Array(heads.length * pairs.length);
    heads.forEach((_, head) => pairs.forEach(([x, y], place) => {
      change[head * pairs.length + place] = difference(a[head * wide + x], b[head * wideB + y]);
    }));
    values.set(key, change);
  }
  return { columns, values: values.get(key) };
}

/** B minus A; infinite if one is not finite, NaN if one is missing. */
export const difference = (a, b) => (Number.isNaN(a) || Number.isNaN(b) ? NaN : Number.isFinite(a) && Number.isFinite(b) ? b - a : Infinity);

/** The change of each head since its first finite value, at every column. */
export function changes({ columns, values }) {
  const wide = columns.length;
  return Float32Array.from(values, (value, place) => {
    const from = place - (place % wide);
    const first = values.subarray(from, from + wide).find(Number.isFinite);
    return value - (first ?? NaN);
  });
}

/** The heads shown, in order of layer, size of change, or first alarm. */
export function shownHeads() {
  const some = [...heads.keys()].filter((head) => state.layer < 0 || heads[head].layer === state.layer);
  if (state.sort === "layer") return some;
  const { columns, values } = shown();
  const wide = columns.length;
  const key = new Map();
  if (state.sort === "change") {
    for (const head of some) {
      const own = values.subarray(head * wide, (head + 1) * wide).filter(Number.isFinite);
      key.set(head, own.length ? own.reduce((low, value) => Math.min(low, value), Infinity) - own.reduce((high, value) => Math.max(high, value), -Infinity) : 0);
    }
  } else {
    for (const { head, step } of shownAlarms()) key.set(head, Math.min(step, key.get(head) ?? Infinity));
  }
  return some.sort((a, b) => (key.get(a) ?? Infinity) - (key.get(b) ?? Infinity) || a - b);
}

/**
 * The index of the column that contains a step, or −1.
 * @param {Steps[]} columns
 * @param {number} step
 */
export const columnAt = (columns, step) => columns.findIndex(({ from, to, first, last }) => (step >= from && step < to) || (step >= first && step <= last));

/**
 * The index of the column nearest to a step.
 * @param {Steps[]} columns
 * @param {number} step
 */
export function nearest(columns, step) {
  let best = 0;
  columns.forEach(({ middle }, place) => { if (Math.abs(middle - step) < Math.abs(columns[best].middle - step)) best = place; });
  return best;
}

/** The index of the chosen column among those shown. */
export const chosenColumn = (columns = shown().columns) => (state.step === Infinity ? columns.length - 1 : nearest(columns, state.step));

/** The first and last step on the axes: the zoomed range, or that of all runs. */
export const reach = () => state.zoom ?? wholeReach();

export function wholeReach() {
  const ends = runs.flatMap(({ columns }) => [columns[0].from, columns.at(-1).to]);
  return [Math.min(...ends), Math.max(...ends)];
}

export const RUN_NAMES = ["A", "B"];
export const everyAlarm = () => runs.flatMap((run, number) => run.alarms.map((alarm) => ({ ...alarm, number })));
export const canDiffer = () => runs.length > 1 && runs.both.columns.length > 0;

/** The alarms shown: those of a run, or of both runs if their difference is shown. */
export const shownAlarms = () => (state.run === DIFFERENCE ? runs : [runs[state.run]]).flatMap(({ alarms }) => alarms);
