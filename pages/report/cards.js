// Cards: for each label found, the strongest head, with its map.

import { ofHead } from "../shared/codec.js";
import { $, dark, el } from "../shared/dom.js";
import { headInWords, headName, whole } from "../shared/words.js";
import { choose, tellBest } from "./choice.js";
import { glyph, headButton } from "./labels.js";
import { data, firstLabel } from "./look.js";
import { drawMap } from "./map.js";
import { expected } from "./proof.js";
import { state } from "./state.js";
import { bestExamples } from "./telling.js";
import { figure } from "./words.js";

/** The examples, each with a different head in front; a label whose heads all have a card already is left out. */
function oneCardEach(examples) {
  const taken = new Set();
  return examples.flatMap(({ name, rows }) => {
    const row = rows.find((index) => !taken.has(index));
    if (row === undefined) return [];
    taken.add(row);
    return [{ name, rows: [row, ...rows.filter((index) => index !== row)], label: data.rows[row].labels.find(({ label }) => label === name) }];
  });
}

/**
 * The layer and map that a label is based on: those of the repeated random tokens if its metric uses them, else of the text.
 * @param {{ rows: number[], label: Label }} example
 */
async function proofOf({ rows: [index], label }) {
  const row = data.rows[index];
  const layer = label.key.endsWith("_random") && row.of.twin ? row.of.twin : row.of;
  return { row, layer, map: await ofHead(layer.maps, row.head) };
}

const cards = { drawn: "" };

/** Draws the cards, unless they are up to date. */
export async function drawCards() {
  const now = [state.run, state.scale, dark.matches, $("cards").clientWidth].join();
  if (cards.drawn === now) return markCard();
  const examples = oneCardEach(bestExamples());
  const proofs = await Promise.all(examples.map(proofOf));
  if (state.view !== "heads") return undefined;
  cards.drawn = now;
  $("cards").replaceChildren(...examples.map((example, place) => card(example, proofs[place].row, place)));
  $("cards-what").textContent = examples.length ? "For each label, the head that is furthest past its threshold; each head is shown once."
    : "No rule holds for any head, so no head has a label. The map of heads and the table show their metrics.";
  examples.forEach(({ label }, place) => {
    const { row, layer, map } = proofs[place];
    drawMap(`card-${place}`, row, layer, map, { small: true, guides: expected(label, layer)?.lines ?? [] });
  });
  await drawImportant();
  return markCard();
}

/** Draws the heads that the loss depends on most, by ablation or else by the sensitivity of the loss. */
async function drawImportant() {
  const key = ["ablation", "importance"].find((name) => data.column.has(name));
  const rows = key ? data.rows.filter((row) => row[key] > 0).sort((a, b) => b[key] - a[key]).slice(0, 4) : [];
  $("important-box").hidden = !rows.length;
  if (!rows.length) return;
  const column = data.column.get(key);
  $("important-what").textContent = key === "ablation" ? "Ablating one of these heads increases the loss most." : "The loss is most sensitive to these heads.";
  const maps = await Promise.all(rows.map((row) => ofHead(row.of.maps, row.head)));
  $("important").replaceChildren(...rows.map((row, place) => {
    const index = data.rows.indexOf(row);
    const title = el("button", { type: "button", class: "plain title", "data-row": index }, glyph(firstLabel(row)), el("b", {}, headName(row)), ` ${firstLabel(row)}${row.labels.length > 1 ? ` +${row.labels.length - 1}` : ""}`);
    title.setAttribute("aria-label", `${headInWords(row)}: ${column.title} ${figure(row[key], column)}`);
    title.addEventListener("click", () => choose(index));
    const map = el("div", { class: "plot", id: `important-${place}`, "aria-hidden": "true" });
    map.addEventListener("click", () => choose(index));
    return el("li", { class: "card" }, title, map, el("p", {}, `${column.title}: `, el("b", {}, `${row[key] > 0 ? "+" : ""}${figure(row[key], column)}`), ` ${column.unit}`));
  }));
  rows.forEach((row, place) => drawMap(`important-${place}`, row, row.of, maps[place], { small: true, guides: [] }));
}

function card({ name, rows, label }, row, place) {
  const column = data.column.get(label.key);
  const rule = data.rules.find((one) => one.label === name && one.key === label.key) ?? data.rules.find((one) => one.label === name);
  const title = el("button", { type: "button", class: "plain title", "data-row": rows[0] }, glyph(name), el("b", {}, name), ` ${headName(row)}`);
  title.setAttribute("aria-label", `${name} ${headName(row)}: ${headInWords(row)}`);
  title.addEventListener("click", () => chooseCard(rows[0], label));
  const map = el("div", { class: "plot", id: `card-${place}`, "aria-hidden": "true" });
  map.addEventListener("click", () => chooseCard(rows[0], label));
  const others = rows.slice(1, 7).map((other) => headButton(data.rows[other], () => choose(other)));
  const left = rows.length - 1 - others.length;
  const on = label.key.endsWith("_random") && row.of.twin ? "on repeated random tokens" : `on the ${row.of.from.grid ? "image" : "text"}`;
  return el("li", { class: "card", "data-label": name }, title, map, el("p", { class: "on-what" }, el("small", {}, `Its map ${on}`)),
    el("p", {}, rule?.why ? `${rule.why[0].toUpperCase()}${rule.why.slice(1)}. ` : "",
      el("small", {}, `${column?.title ?? label.key} ${figure(label.score, column)}`)),
    el("p", { class: "others" }, ...(others.length ? ["also ", ...others.flatMap((button) => [button, " "]), left ? `and ${whole(left)} more` : ""] : [])));
}

/** Chooses a card's head, on the input that its label is based on. */
async function chooseCard(index, label) {
  const twin = label.key.endsWith("_random") && data.rows[index].of.twin;
  Object.assign(state, { row: index, on: twin ? "repeats" : "text", ranges: undefined });
  await tellBest();
  $("story").scrollIntoView({ block: "nearest" });
}

function markCard() {
  for (const one of document.querySelectorAll(".cards .card")) {
    one.classList.toggle("chosen", Number(one.querySelector("[data-row]").dataset.row) === state.row);
  }
}
