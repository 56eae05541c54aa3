// The tooltip beside the pointer.

import { $, el } from "./dom.js";

/** Shows lines of [name, code or null, tail] beside the pointer. */
export function showTip(event, lines) {
  const tip = $("tip");
  tip.replaceChildren(...lines.map(([name, code, tail]) => {
    const line = el("div", {}, `${name} `);
    if (code !== null) line.append(el("code", {}, code), " ");
    line.append(el("b", {}, tail));
    return line;
  }));
  tip.hidden = false;
  const point = event.touches?.[0] ?? event;
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const left = point.clientX + 16 + width > innerWidth ? point.clientX - width - 16 : point.clientX + 16;
  const top = point.clientY + 16 + height > innerHeight ? point.clientY - height - 12 : point.clientY + 16;
  tip.style.left = `${Math.max(6, left)}px`;
  tip.style.top = `${Math.max(6, top)}px`;
}

export const hideTip = () => { $("tip").hidden = true; };
