// Numbers, head names and subscripts formatted for display.

import { el } from "./dom.js";

export const whole = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");
export const counted = (value, word) => `${whole(value)} ${word}${value === 1 ? "" : "s"}`;
export const percent = (value) => `${Math.round(value * 100)}\u202f%`;
export const weight = (value) => (value > 0 && value < 0.0005 ? "<0.001" : value.toFixed(3));

/** Text shortened to at most `most` characters. */
export const shortened = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);

/** Text with each `_{…}` as a subscript. */
export const subscripts = (text) => text.split(/_\{([^}]*)\}/).map((part, index) => (index % 2 ? el("sub", {}, part) : part));
export const unitName = (column) => (["nats", "tokens"].includes(column?.unit) ? ` ${column.unit}` : "");
/** The name of a head: `L5H3`. */
export const headName = ({ layer, head }) => `L${layer}H${head}`;
export const headInWords = ({ layer, head }) => `layer ${layer}, head ${head}`;

/** The layer and head that `L5H3` or `5.3` names; undefined for any other text. */
export function parseHead(text) {
  const [, layer, head] = text.match(/^(?:l(\d+)h(\d+))$/i) ?? text.match(/^(\d+)\.(\d+)$/) ?? [];
  return layer === undefined ? undefined : { layer: Number(layer), head: Number(head) };
}
