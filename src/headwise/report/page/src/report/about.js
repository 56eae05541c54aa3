// The header, and what the page says of itself: how it was made, the rules, the formulas.

views.about = { title: "About", more: true, draw: drawAbout };

function drawHeader() {
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
  if (typeof made.loss_text === "number") facts.push(fact(made.loss_text.toFixed(2), `nats of loss on ${made.loss ?? "each token"}`));
  if (typeof made.loss_first_copy === "number") {
    facts.push(fact(`${made.loss_first_copy.toFixed(2)} → ${made.loss_second_copy.toFixed(2)}`, "nats of loss on random tokens, the first time → when they come again"));
  }
  if (runs.length > 1) facts.unshift(fact("AB"[state.run], "is shown:"));
  $("word-repeats").hidden = !data.repeats.length;
  $("word-loss").hidden = runs.every((run) => !lossOf(run));
  $("facts").replaceChildren(...facts);
  $("notice").hidden = !made.notice;
  $("notice").textContent = made.notice ?? "";
}

/** The losses of a look in words; undefined where none is known. */
const lossOf = ({ made }) => made.find(([name]) => name === "Loss")?.[1];

function drawAbout() {
  const tried = data.rules.filter((rule) => evaluated(rule) && !ofClass(rule));  // others need what this model does not have
  const limit = (key, sign, threshold) => `${(data.column.get(key)?.title ?? key).toLowerCase()} ${sign} ${threshold}`;
  const conditions = ({ key, sign, threshold, given }) => limit(key, sign, threshold) + (given ? `, and ${limit(...given)}` : "");
  $("rules").replaceChildren(...tried.map((rule) => el("li", {}, el("b", {}, rule.label), el("span", {}, conditions(rule), el("br"),
    el("small", {}, [rule.why, rule.source].filter(Boolean).join(" · "))))),
  el("li", {}, el("b", {}, NONE), el("span", {}, "otherwise")));
  $("formulas").replaceChildren(...data.columns.map((column) => el("div", {}, el("dt", {}, column.title),
    el("dd", {}, formula(column.formula)), el("dd", {}, column.meaning))));
  const lines = (made) => made.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, ...subscripts(value))]);
  $("made").replaceChildren(...lines(runs[0].made));
  if (runs.length === 1) return;
  const before = new Set(runs[0].made.map(String));
  const other = runs[1].made.filter((line) => !before.has(String(line)));
  $("made").prepend(el("dt", {}, el("b", {}, "A")), el("dd", {}));
  $("made").append(el("dt", {}, el("b", {}, "B")), el("dd", {}, other.length ? "as A, but:" : "as A"), ...lines(other));
}
