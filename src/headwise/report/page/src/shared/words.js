// Numbers, names of heads, and subscripts as people read them.

import { el } from "./dom.js";





export const whole = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");
export const counted = (value, word) => `${whole(value)} ${word}${value === 1 ? "" : "s"}`;
export const percent = (value) => `${Math.round(value * 100)}\u202f%`;
export const weight = (value) => (value > 0 && value < 0.0005 ? "<0.001" : value.toFixed(3));

/** Text of `most` letters at most. */
export const shortened = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);

/** Text whose `_{…}` are subscripts. */
export const subscripts = (text) => text.split(/_\{([^}]*)\}/).map((part, index) => (index % 2 ? el("sub", {}, part) : part));
export const unitName = (column) => (["nats", "tokens"].includes(column?.unit) ? ` ${column.unit}` : "");
export const headName = (row) => `Layer ${row.layer}, head ${row.head}`;
export const headShort = (row) => `${row.layer}.${row.head}`;
