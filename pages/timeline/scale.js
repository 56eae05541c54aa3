// Formatting of values, and the scales on which they are drawn.

import { roundTicks } from "../shared/chart.js";
import { whole } from "../shared/words.js";
import { DIFFERENCE, data, isShare, runs, state } from "./run.js";

/** A value as text. */
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
 * The bounds of the finite values over all runs: `{ low, high, least }`; `least` is the smallest value above zero.
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

/** Returns true if a logarithmic scale makes sense, on each side of zero if there are two. */
export const canLog = (statistic) => bounds(statistic).high > 0;

/** The chosen scale or, without one, a scale that fits: logarithmic if a few values dwarf the rest. */
export function scaleOf(statistic) {
  if (state.scale === "change" && state.run !== DIFFERENCE) return "change";
  if (!canLog(statistic)) return "linear";
  if (state.scale && state.scale !== "change") return state.scale;
  const { low, high } = bounds(statistic);
  const middles = runs.flatMap((run) => run.crowd[statistic.key][1]).filter((value) => value !== null).sort((a, b) => a - b);
  return !isShare(statistic) && low >= 0 && high > 30 * middles[middles.length >> 1] ? "log" : "linear";
}

/** A function that maps a value to its fraction of a scale from `low` to `high`. */
export function scaler(low, high, log) {
  if (!log) return (value) => (value - low) / (high - low || 1);
  const [start, span] = [Math.log(low), Math.log(high / low) || 1];
  return (value) => (value <= low ? 0 : (Math.log(value) - start) / span);
}

/** The same for differences from −`end` to `end`; with `log`, sizes well above `one` are on a logarithmic scale. */
export function signedScaler(end, one, log) {
  const size = (value) => (log ? Math.log1p(value / one) / Math.log1p(end / one) : value / end);
  return (value) => 0.5 + 0.5 * Math.sign(value) * size(Math.abs(value));
}

/** About `many` ticks of a scale from `low` to `high`. */
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
 * Ticks of a step axis that is `wide` pixels wide: as many as there is room for.
 * @param {number[]} reach
 * @param {number} wide
 */
export function stepTicks([low, high], wide) {
  return roundTicks(Math.max(low, 0), high, Math.max(2, Math.min(10, Math.floor(wide / 75)))).filter(([step]) => Number.isInteger(step));
}
