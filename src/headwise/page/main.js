// What is written once, and the start.

function drawHeader() {
  const made = data.provenance;
  $("model").textContent = made.model;
  $("text").textContent = made.text;
  const fact = (value, words) => el("li", {}, el("b", {}, value), ` ${words}`);
  const facts = [fact(whole(data.layers), data.layers === 1 ? "layer" : "layers"), fact(whole(data.heads), "heads each"),
    fact(whole(data.tokens.length), "tokens")];
  if (made.loss_text != null) facts.push(fact(made.loss_text.toFixed(2), "nats a token on the text"));
  if (made.loss_first_copy != null) {
    facts.push(fact(`${made.loss_first_copy.toFixed(2)} → ${made.loss_second_copy.toFixed(2)}`, "nats a token, random tokens → their repeat"));
  }
  $("facts").append(...facts);
  if (made.notice) { $("notice").hidden = false; $("notice").textContent = made.notice; }
  const cells = perCell === 1 ? "Each cell is one query and one key: the exact weight."
    : `Each cell is a block of ${Math.floor(perCell)}${Number.isInteger(perCell) ? "" : ` or ${Math.ceil(perCell)}`} tokens: the weight that its queries put on a block of keys, on average.`;
  $("attention-what").textContent = `${cells} A row sums to 1; keys after the query are out of sight and left blank.`;
  $("attention-help").textContent = coarse.matches ? "Tap a cell to choose its token." : "Drag to zoom in, click to choose a token.";
}

function drawNotes() {
  $("rules").append(...data.rules.map((rule) => el("li", {}, el("b", {}, rule.label),
    el("span", {}, `${columns.get(rule.key).title.toLowerCase()} ${rule.sign} ${rule.threshold}`, el("br"), el("small", {}, rule.why)))));
  $("rules").append(el("li", {}, el("b", {}, data.no_label), el("span", {}, "otherwise")));
  $("formulas").append(...data.columns.map((column) => el("div", {}, el("dt", {}, column.title),
    el("dd", {}, formula(column.formula)), el("dd", {}, column.meaning))));
  $("made").append(...data.made.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** A token worth showing first: far into the text, with much weight on one key in between. */
function tellingToken(weights) {
  let [best, most] = [weights.length - 1, 0];
  for (let query = weights.length >> 1; query < weights.length; query++) {
    const top = Math.max(0, ...weights[query].slice(1, query));
    if (top > most) [best, most] = [query, top];
  }
  return tokensOf(best)[0];
}

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for the page; any of 2023 or later will do");
  state.statistic = "label";
  const asked = location.hash.match(/^#(\d+)\.(\d+)$/);
  const found = asked ? rowAt(Number(asked[1]), Number(asked[2])) : -1;
  const score = (row) => (row.label_key === data.rules[0].key ? row.label_score : -1);
  const first = data.rows.reduce((top, row, index) => (score(row) > score(data.rows[top]) ? index : top), 0);
  state.row = found >= 0 ? found : first;
  const { layer, head } = chosen();
  state.token = tellingToken(await headMap(layer, head));
  drawHeader();
  drawNotes();
  drawStatistics();
  drawTable();
  drawTokens();
  const script = el("script");
  script.textContent = new TextDecoder().decode(await unpack("plotly"));
  document.head.append(script);
  drawHeads();
  connectHeads();
  drawReadout();
  markRow();
  await drawAttention();
  connectAttention();
  chooseToken(state.token);
  const redraw = () => { drawHeads(); drawMap(); };
  dark.addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    requestAnimationFrame(redraw);
  });
  addEventListener("scroll", hideTip, { passive: true });
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  $("fault").hidden = false;
  $("fault").textContent = `The page could not be drawn: ${error.message}`;
  console.error(error);
});
