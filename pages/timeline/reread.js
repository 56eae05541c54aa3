// Reloading the page while a training run continues.

import { $ } from "../shared/dom.js";
import { remember } from "./choice.js";
import { data } from "./run.js";

const LONGEST = 300;  // maximum seconds between two reloads of a file that does not change
let touched = 0;      // time of the last input on this page

/** Reloads the page at an interval, unless someone is using it or it is hidden. */
export function keepReading() {
  const { every, written: when } = data.reread;
  const { when: before, wait: waited, scroll, focus } = history.state ?? {};
  const wait = scroll !== undefined && before === when ? Math.min(2 * waited, LONGEST) : every;
  history.replaceState({ when, wait }, "", location.hash);
  if (scroll) scrollTo({ top: scroll });
  if (focus) $(focus)?.focus({ preventScroll: true });
  $("live").hidden = false;
  $("live-what").textContent = `written ${new Date(when * 1000).toLocaleTimeString("en-GB")}, reloaded every ${every} s`;
  $("follow").addEventListener("change", remember);
  for (const name of ["pointermove", "pointerdown", "keydown", "wheel", "touchmove"]) {
    addEventListener(name, () => { touched = Date.now(); }, { passive: true });
  }
  const due = Date.now() + wait * 1000;
  setInterval(() => {
    const busy = Date.now() - touched < 3000 || document.hidden || String(getSelection());
    if (Date.now() < due || busy || !$("follow").checked) return;
    history.replaceState({ when, wait, scroll: scrollY, focus: document.activeElement?.id ?? "" }, "", location.hash);
    location.reload();
  }, 250);
}
