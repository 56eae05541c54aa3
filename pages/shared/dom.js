// Document elements, custom properties of the style sheet, groups of radio buttons, and the error message.

/**
 * The element with an id.
 * @returns {Box}
 */
export const $ = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
export const dark = matchMedia("(prefers-color-scheme: dark)");
export const coarse = matchMedia("(pointer: coarse)");
const properties = new Map();  // custom properties already read from the style sheet

dark.addEventListener("change", () => properties.clear());

/** A custom property of the style sheet, such as `--ink`. */
export function css(name) {
  if (!properties.has(name)) properties.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return properties.get(name);
}

/**
 * An element with attributes and children; strings become text, never markup.
 * @param {string} tag
 * @param {Record<string, any>} attributes
 * @param {(Node | string)[]} children
 * @returns {any}
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Fills a group with radio buttons, of which `value` is on. `options` are [value, text, long name], or a string of plain text. */
export function switches(box, name, options, value, change) {
  const legend = box.querySelector("legend");
  const held = box.contains(document.activeElement);
  box.replaceChildren(...(legend ? [legend] : []), ...options.map((option) => {
    if (typeof option === "string") return el("i", {}, option);
    const [key, text, title] = option;
    const input = el("input", { type: "radio", name, value: key, ...(title ? { "aria-label": title } : {}) });
    input.checked = key === value;
    input.addEventListener("change", () => change(key));
    return el("label", title ? { title } : {}, input, el("span", {}, text));
  }));
  if (held) box.querySelector("input:checked")?.focus();
}

/** Turns on the radio button with this value in the group `name`. */
export function check(name, value) {
  for (const input of /** @type {NodeListOf<any>} */ (document.getElementsByName(name))) input.checked = input.value === value;
}

/** Shows an error at the top of the page. */
export function showError(error) {
  $("fault").hidden = false;
  $("fault").textContent = `The page could not be drawn: ${error.message}`;
  console.error(error);
}
