// How values are written, and the scales that they are drawn on.

import { roundTicks } from "../shared/chart.js";
import { whole } from "../shared/words.js";
import { DIFFERENCE, data, isShare, runs, state } from "./run.js";

/** A figure as people read it. */
export function written(value) {
  if (value === null || value === Infinity) return "not finite";
  if (value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const text = size && (size < 1e-4 || size >= 1e7) ? value.toExponential(data.digits - 1)
    : value.toLocaleString("en-GB", { maximumSignificantDigits: data.digits });
  return text.replace("-", "−");
}

export const signedText = (value) => (value > 0 && value < Infinity ? `+${written(value)}` : written(value));
export const shownText = (value) => (state.run === DIFFERENCE ? signedText(value) : written(value));
export const unitText = (statistic) => (statistic.unit === "nats" ? " nats" : "");

/** A standard error, to two digits. */
export const errorText = (value) => (value > 0 ? `± ${Number(value.toPrecision(2)).toLocaleString("en-GB", { maximumSignificantDigits: 2 })}` : "");

/**
 * The steps of a column in words.
 * @param {Steps} column
 */
export function stepText({ first, last, count }) {
  return count === 1 ? `step ${whole(first)}` : `steps ${whole(first)} to ${whole(last)} (${whole(count)} recorded)`;
}

/**
 * The finite figures' bounds, over all runs: `{ low, high, least }`, the least above zero.
 * @param {Statistic} statistic
 */
export function bounds(statistic) {
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
export const canLog = (statistic) => bounds(statistic).high > 0;

/** The scale that is asked for, or one that fits: a logarithm where a few figures dwarf the rest. */
export function scaleOf(statistic) {
  if (state.scale === "change" && state.run !== DIFFERENCE) return "change";
  if (!canLog(statistic)) return "linear";
  if (state.scale && state.scale !== "change") return state.scale;
  const { low, high } = bounds(statistic);
  const middles = runs.flatMap((run) => run.crowd[statistic.key][1]).filter((value) => value !== null).sort((a, b) => a - b);
  return !isShare(statistic) && low >= 0 && high > 30 * middles[middles.length >> 1] ? "log" : "linear";
}

/** From a figure to its share of a scale from `low` to `high`. */
export function scaler(low, high, log) {
  if (!log) return (value) => (value - low) / (high - low || 1);
  const [start, span] = [Math.log(low), Math.log(high / low) || 1];
  return (value) => (value <= low ? 0 : (Math.log(value) - start) / span);
}

/** The same of differences up to `end` either way; with `log`, those above `one` by their logarithm. */
export function signedScaler(end, one, log) {
  const size = (value) => (log ? Math.log1p(value / one) / Math.log1p(end / one) : value / end);
  return (value) => 0.5 + 0.5 * Math.sign(value) * size(Math.abs(value));
}

/** Ticks of a scale from `low` to `high`, about so many. */
export function valueTicks(low, high, many, log = false) {
  if (!log) return roundTicks(low, high, many);
  const decades = Math.log10(high / low);
  const steps = decades > many ? [1] : decades > many / 3 ? [1, 3] : [1, 2, 5];
  const every = Math.max(1, Math.round(decades / many));
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % every === 0) found.push(...steps.map((step) => step * 10 ** power));
  }
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length > 1 ? inside.map((value) => [value, written(value)]) : roundTicks(low, high, many);
}

/**
 * Ticks of the axis of steps, so many pixels wide: one wherever there is room for its number.
 * @param {number[]} reach
 * @param {number} wide
 */
export function stepTicks([low, high], wide) {
  return roundTicks(Math.max(low, 0), high, Math.max(2, Math.min(10, Math.floor(wide / 75)))).filter(([step]) => Number.isInteger(step));
}
