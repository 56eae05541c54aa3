// What is chosen, the columns of a run, and figures of heads over them: of A, of B, of B − A.

const DIFFERENCE = "difference";
const state = { statistic: "", head: 0, step: Infinity, layer: -1, run: "0", scale: "" };
let heads = [];  // { layer, head, module }, in the order of all arrays

/** Unpacks the figures of all runs, and adds what charts need. */
async function prepareRuns(found) {
  data = found;
  runs = data.runs;
  heads = data.layers.flatMap(([module, count], layer) => Array.from({ length: count }, (_, head) => ({ layer, head, module })));
  for (const run of runs) {
    for (const kind of ["values", "errors"]) {
      const grids = await Promise.all(Object.entries(run[kind]).map(async ([key, grid]) => [key, (await numbers(grid)).values]));
      run[kind] = new Map(grids);
    }
    run.columns = columnsOf(run.first, run.last, run.count);
    run.alarms = run.alarms.step.map((step, place) => Object.fromEntries(Object.entries(run.alarms).map(([key, all]) => [key, all[place]])));
  }
  if (runs.length === 2) runs.both = bothColumns(...runs.map(({ columns }) => columns));
}

/** Columns with the steps that they stand for and their edges on the axis of steps. */
function columnsOf(first, last, count) {
  const middle = first.map((step, place) => (step + last[place]) / 2);
  const gaps = middle.slice(1).map((step, place) => step - middle[place]).sort((a, b) => a - b);
  const usual = gaps.length ? gaps[gaps.length >> 1] : 1;  // over wider gaps than usual nothing is drawn
  const half = (place, side) => Math.min(Math.abs((middle[place + side] ?? middle[place] + usual) - middle[place]) / 2, usual);
  return first.map((step, place) => ({
    first: step, last: last[place], count: count[place], middle: middle[place],
    from: Math.max(0, middle[place] - half(place, -1)), to: middle[place] + half(place, 1),
  }));
}

/** The columns that A and B share, each with its place in both. */
function bothColumns(a, b) {
  const name = ({ first, last, count }) => `${first} ${last} ${count}`;
  const place = new Map(b.map((column, index) => [name(column), index]));
  const pairs = a.map((column, index) => [index, place.get(name(column))]).filter(([, other]) => other !== undefined);
  const columns = columnsOf(...["first", "last", "count"].map((key) => pairs.map(([index]) => a[index][key])));
  return { columns, pairs, values: new Map() };
}

const isShare = (statistic) => statistic.unit === "share";
const statisticOf = (key = state.statistic) => data.statistics.find((one) => one.key === key);

/** What is shown of a statistic: columns, and the figures `[heads × columns]`. */
function shown(key = state.statistic) {
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

/** B less A; not finite where one is not, NaN where one is missing. */
const difference = (a, b) => (Number.isNaN(a) || Number.isNaN(b) ? NaN : Number.isFinite(a) && Number.isFinite(b) ? b - a : Infinity);

/** The column that a step lies in, or −1. */
const columnAt = (columns, step) => columns.findIndex(({ from, to, first, last }) => (step >= from && step < to) || (step >= first && step <= last));

/** The column nearest to a step. */
function nearest(columns, step) {
  let best = 0;
  columns.forEach(({ middle }, place) => { if (Math.abs(middle - step) < Math.abs(columns[best].middle - step)) best = place; });
  return best;
}

/** The column that is chosen of those shown. */
const chosenColumn = (columns = shown().columns) => (state.step === Infinity ? columns.length - 1 : nearest(columns, state.step));

/** The first and the last step on the axes, of all runs. */
function reach() {
  const ends = runs.flatMap(({ columns }) => [columns[0].from, columns.at(-1).to]);
  return [Math.min(...ends), Math.max(...ends)];
}

// --- how it is written -------------------------------------------------------------------------

/** A figure as people read it. */
function written(value) {
  if (value === null || value === Infinity) return "not finite";
  if (value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const text = size && (size < 1e-4 || size >= 1e7) ? value.toExponential(data.digits - 1)
    : value.toLocaleString("en-GB", { maximumSignificantDigits: data.digits });
  return text.replace("-", "−");
}

const signedText = (value) => (value > 0 && value < Infinity ? `+${written(value)}` : written(value));
const shownText = (value) => (state.run === DIFFERENCE ? signedText(value) : written(value));
const unitText = (statistic) => (statistic.unit === "nats" ? " nats" : "");

/** A standard error, to two digits. */
const errorText = (value) => (value > 0 ? `± ${Number(value.toPrecision(2)).toLocaleString("en-GB", { maximumSignificantDigits: 2 })}` : "");

/** The steps of a column in words. */
function stepText({ first, last, count }) {
  return count === 1 ? `step ${whole(first)}` : `steps ${whole(first)} to ${whole(last)} (${whole(count)} recorded)`;
}

// --- scales ------------------------------------------------------------------------------------

/** The finite figures' bounds, over all runs: `{ low, high, least }`, the least above zero. */
function bounds(statistic) {
  if (statistic.bounds) return statistic.bounds;
  let [low, high, least] = [Infinity, -Infinity, Infinity];
  for (const run of runs) {
    for (const value of run.values.get(statistic.key)) {
      if (!Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
      if (value > 0 && value < least) least = value;
    }
  }
  statistic.bounds = { low, high, least };
  return statistic.bounds;
}

/** Whether a logarithm makes sense, of each side of zero where there are two. */
const canLog = (statistic) => bounds(statistic).high > 0;

/** The scale that is asked for, or one that fits: a logarithm where a few figures dwarf the rest. */
function scaleOf(statistic) {
  if (!canLog(statistic)) return "linear";
  if (state.scale) return state.scale;
  const { low, high } = bounds(statistic);
  const middles = runs.flatMap((run) => run.crowd[statistic.key][1]).filter((value) => value !== null).sort((a, b) => a - b);
  return !isShare(statistic) && low >= 0 && high > 30 * middles[middles.length >> 1] ? "log" : "linear";
}

/** From a figure to its share of a scale from `low` to `high`. */
function scaler(low, high, log) {
  if (!log) return (value) => (value - low) / (high - low || 1);
  const [start, span] = [Math.log(low), Math.log(high / low) || 1];
  return (value) => (value <= low ? 0 : (Math.log(value) - start) / span);
}

/** The same of differences up to `end` either way; with `log`, those above `one` by their logarithm. */
function signedScaler(end, one, log) {
  const size = (value) => (log ? Math.log1p(value / one) / Math.log1p(end / one) : value / end);
  return (value) => 0.5 + 0.5 * Math.sign(value) * size(Math.abs(value));
}

/** Round numbers from `low` to `high`, about so many. */
function ticks(low, high, many, log = false) {
  if (log) {
    const decades = Math.log10(high / low);
    const steps = decades > many ? [1] : decades > many / 3 ? [1, 3] : [1, 2, 5];
    const every = Math.max(1, Math.round(decades / many));
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      if (power % every === 0) found.push(...steps.map((step) => step * 10 ** power));
    }
    const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    return inside.length > 1 ? inside : ticks(low, high, many);
  }
  const rough = (high - low) / many || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

const tickText = (value) => (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4) ? value.toExponential(0) : value.toLocaleString("en-GB", { maximumSignificantDigits: 6 })).replace("-", "−");
