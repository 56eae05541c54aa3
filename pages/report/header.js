// The header: the model, the input and the losses.

import { $, el } from "../shared/dom.js";
import { counted, whole } from "../shared/words.js";
import { data, runs } from "./look.js";
import { state } from "./state.js";

export function drawHeader() {
  const made = data.provenance;
  $("model").textContent = made.title ?? made.model;
  for (const part of [$("text"), $("one-name").querySelector(".on")]) part.hidden = Boolean(made.title);
  $("text").textContent = made.text;
  $("one-name").hidden = runs.length > 1;
  $("both-names").hidden = runs.length === 1;
  $("both-names").replaceChildren(...runs.map(({ title }, run) => el("span", { class: run === state.run ? "shown" : "" }, el("b", {}, "AB"[run]), ` ${title}`)));
  const fact = (value, words) => el("li", {}, el("b", {}, value), ` ${words}`);
  const facts = made.title ? [fact(made.model, `on ${made.text}`)] : [];
  facts.push(fact(whole(data.rows.length), `head${data.rows.length === 1 ? "" : "s"} in ${counted(data.layers.length, "layer")}`));
  const many = made.texts > 1;
  for (const { name, tokens, positions } of data.streams) {
    if (positions) continue;
    const what = { image: "tokens of the image", text: "tokens" }[name] ?? `${name} tokens`;
    const first = { image: "tokens of the first image", text: "tokens of the first text" }[name] ?? `${what} of the first text`;
    facts.push(fact(whole(tokens.length), many ? first : what));
  }
  if (many) facts.push(fact(whole(made.texts), data.streams[0].grid ? "images" : "texts"));
  if (typeof made.loss_text === "number") facts.push(fact(made.loss_text.toFixed(2), (made.loss ?? "each token").startsWith("each token") ? "loss per token (nats)" : `loss (nats) on ${made.loss}`));
  if (typeof made.loss_first_copy === "number") {
    facts.push(fact(`${made.loss_first_copy.toFixed(2)} → ${made.loss_second_copy.toFixed(2)}`, "loss on random tokens → on their repetition (nats)"));
  }
  if (runs.length > 1) facts.unshift(fact("AB"[state.run], "is shown:"));
  $("word-repeats").hidden = !data.repeats.length;
  $("word-loss").hidden = runs.every((run) => !lossOf(run));
  $("facts").replaceChildren(...facts);
  $("finding").textContent = runs.length > 1 ? "" : data.finding;
  $("notice").hidden = !made.notice;
  $("notice").textContent = made.notice ?? "";
}

/** The losses of a look in words; undefined if none is known. */
export const lossOf = ({ made }) => made.find(([name]) => name === "Loss")?.[1];
