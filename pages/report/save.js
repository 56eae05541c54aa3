// Saving a chart as a file, and copying a link to the current view.

import { chart, lettering, rampMarks } from "../shared/chart.js";
import { $, css, el } from "../shared/dom.js";
import { drawn } from "../shared/draw.js";
import { headName } from "../shared/words.js";
import { labelColor, styleOf } from "./labels.js";
import { data, runs } from "./look.js";
import { chosen, embedded, savedName, state } from "./state.js";

const LEAST = 340;  // minimum width of a saved picture in pixels, so that its text fits
const LINE = 17;

/** Wraps words into lines of about `width` pixels. */
function inLines(words, width) {
  const most = Math.max(20, Math.floor(width / 6.7));
  return words.split(" ").reduce((lines, word) => {
    const last = lines.at(-1);
    if (last && last.length + word.length < most) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
    return lines;
  }, []);
}

/**
 * The caption of a saved picture: [title, scale, model and text].
 * @param {Box} box
 */
function caption(box) {
  const { title, scale = "", random } = box.chart.says ?? {};
  const name = box.closest("section")?.querySelector("h2")?.textContent ?? "";
  const both = runs.length > 1 && state.view === "compare";
  const source = both ? runs.map((run, index) => `${"AB"[index]}: ${run.title}`).join("; ") : random ? data.provenance.model : data.title;
  return [title ?? `${headName(chosen())}: ${box.parentElement.querySelector("h3")?.textContent || name}`, scale,
    `${source}${random ? ", on repeated random tokens" : ""}. headwise look`].filter(Boolean);
}

/** A saved picture's title and caption, as lines `[text, attributes]`. */
function captionLines(box, width) {
  const [title, ...rest] = caption(box);
  const plain = rest.flatMap((words) => inLines(words, width - 20)).map((text) => [text, { fill: css("--muted") }]);
  return [...inLines(title, (width - 20) * 0.85).map((text) => [text, { fill: css("--ink"), "font-weight": 650, "font-size": 14 }]), ...plain];
}

/** The legend of label colors and glyphs under a saved picture. */
function keyMarks(names, width, top) {
  const across = Math.max(1, Math.floor((width - 20) / 150));
  return names.map((name, place) => {
    const [x, y] = [10 + 150 * (place % across), top + LINE * Math.floor(place / across)];
    return drawn("g", { transform: `translate(${x} ${y})` }, drawn("path", { d: styleOf(name).glyph, fill: labelColor(name), "fill-rule": "evenodd" }),
      lettering(18, 10, name));
  });
}

/**
 * The chart in a box as one SVG: its title, axes and marks, the grid as an image beneath them, and its color bar or legend.
 * @param {Box} box
 */
function chartAsSvg(box) {
  const { area, says = {}, grid } = box.chart;
  const scaled = !box.chart.ramp && says.marks && grid?.stops;
  const [inside, tall] = [box.chart.width + (scaled ? 46 : 0), box.chart.height];
  const width = Math.max(inside, LEAST);
  const lines = captionLines(box, width);
  const names = says.labels ?? [];
  const top = 12 + LINE * lines.length;
  const height = top + tall + (names.length ? 10 + LINE * Math.ceil(names.length / Math.max(1, Math.floor((width - 20) / 150))) : 0);
  const svg = box.querySelector("svg").cloneNode(true);
  svg.querySelector(".area").remove();
  const body = drawn("svg", { y: top, width: inside, height: tall, overflow: "visible" });
  const under = [];
  const canvas = box.querySelector("canvas");
  if (canvas) {
    const { left, top, width: wide, height: tall, imageRendering } = canvas.style;
    under.push(drawn("svg", { ...area }, drawn("image", {
      href: canvas.toDataURL(), x: parseFloat(left), y: parseFloat(top), width: parseFloat(wide), height: parseFloat(tall),
      preserveAspectRatio: "none", style: `image-rendering:${imageRendering}`,
    })));
  }
  body.append(...under, ...svg.childNodes);
  if (scaled) body.append(...rampMarks({ ...box.chart, ramp: says.marks, width: inside, margin: { ...box.chart.margin, r: 46 } }, `${box.id}-saved`));
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(name, value);
  svg.replaceChildren(drawn("title", {}, caption(box).join(". ")), drawn("rect", { width, height, fill: css("--panel") }),
    ...lines.map(([text, more], place) => lettering(10, 18 + LINE * place, text, more)), body, ...keyMarks(names, width, top + tall + 4));
  return new XMLSerializer().serializeToString(svg);
}

/**
 * The chart as a PNG with twice the page's pixels in each direction.
 * @param {Box} box
 */
async function chartAsPng(box) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(chartAsSvg(box))}`;
  await picture.decode();
  const { naturalWidth: width, naturalHeight: height } = picture;
  const canvas = el("canvas", { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(picture, 0, 0, 2 * width, 2 * height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function saveAs(name, content) {
  const link = el("a", { href: URL.createObjectURL(content), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Copies a chart as a picture, with its title and caption. */
async function copyPicture(box, button) {
  try {
    await navigator.clipboard.write([new ClipboardItem({ "image/png": chartAsPng(box) })]);
    say(button, "copied", "Picture copied");
  } catch {
    say(button, "not allowed here; use PNG");
  }
}

/** Shows a note instead of a button's text for a while, and announces it to screen readers. */
function say(button, note, told = note) {
  const text = button.dataset.text ??= button.textContent;
  button.textContent = note;
  $("said").textContent = told;
  setTimeout(() => { button.textContent = text; }, 5000);
}

/** Copies the address of the current view. */
async function copyLink(button) {
  try {
    await navigator.clipboard.writeText(location.href);
  } catch {  // not allowed here: use the older method
    const field = el("textarea", { class: "hidden" });
    field.value = location.href;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const note = location.protocol === "file:" ? "copied; it works only on this machine. To share it, send the file and the part of the link after #." : "copied";
  say(button, note, `The link is ${note}`);
}

/**
 * Draws a chart, with buttons under it that save it.
 * @param {string} id
 * @param {ChartSpec} spec
 */
export function picture(id, spec) {
  const box = chart(id, spec);
  if (box.chart && !box.closest(".card") && !box.nextElementSibling?.matches(".save")) box.after(saveButtons(box));
  return box;
}

/**
 * Buttons under a chart that save or copy it, and copy the address of the current view.
 * @param {Box} box
 */
function saveButtons(box) {
  const file = (kind) => `headwise-${box.id}-${savedName()}.${kind}`;
  const button = (text, title, act) => {
    const found = el("button", { type: "button", title, "aria-label": `${title}: ${box.id}` }, text);
    found.addEventListener("click", () => act(found));
    return found;
  };
  return el("p", { class: "save" },
    button("SVG", "Save this picture as SVG", () => saveAs(file("svg"), new Blob([chartAsSvg(box)], { type: "image/svg+xml" }))),
    button("PNG", "Save this picture as PNG", async () => saveAs(file("png"), await chartAsPng(box))),
    button("copy", "Copy this picture", (made) => copyPicture(box, made)),
    ...(embedded ? [] : [button("link", "Copy a link to this view", copyLink)]));
}
