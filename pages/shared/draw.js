// Drawing tools: SVG elements, color scales, and a readable text color for a background.

/**
 * An SVG element.
 * @param {string} tag
 * @param {Record<string, any>} attributes
 * @param {(Node | string)[]} children
 */
export function drawn(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];

export const hex = (color) => [1, 3, 5].map((place) => parseInt(color.slice(place, place + 2), 16));
export const pixel = (r, g, b) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

/** The color at a fraction, 0 to 1, of the way through `stops`: `[red, green, blue]`. */
export function between(stops, share) {
  const place = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const before = Math.min(stops.length - 2, Math.floor(place));
  return stops[before].map((value, part) => Math.round(value + (place - before) * (stops[before + 1][part] - value)));
}

/** 256 colors interpolated between `colors`, as pixels. */
export function palette(colors) {
  const stops = colors.map(hex);
  return Uint32Array.from({ length: 256 }, (_, index) => pixel(...between(stops, index / 255)));
}

/** The relative luminance of `[red, green, blue]` (WCAG 2). */
export function luminance(color) {
  const [r, g, b] = color.map((part) => (part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

export const contrast = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);

/** Black or white, whichever has more contrast on `[red, green, blue]`: at least 4.58. */
export const inkOn = (color) => (contrast(luminance(color), 0) > contrast(luminance(color), 1) ? "#000000" : "#ffffff");
