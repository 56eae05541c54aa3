// The start: unpack, choose, draw the view that the address names.

/** The head to begin with: of the first rule that names one well past its threshold; else the surest of all. */
function tellingHead() {
  const best = bestExamples().map(({ rows, label }) => ({ row: rows[0], sure: surety(label) }));
  const clear = best.find(({ sure }) => sure >= 0.5);
  return (clear ?? best.sort((a, b) => b.sure - a.sure)[0])?.row ?? 0;
}

/** A query worth showing first: one with a clear weight on a key that its head's first label names, of letters if it can be. */
function tellingToken(row, rows) {
  const { layer } = rows;
  const count = layer.from.tokens.length;
  let [best, most] = [count - 1, 0];
  for (let query = Math.min(count - 1, 1); query < count; query++) {
    const [key, value] = strongest(rows, query)[0] ?? [0, 0];
    if (layer.from.special.includes(query)) continue;
    const named = row.labels.findIndex((label) => isExample(label, layer, query, key));
    const both = [layer.from.tokens[query], layer.to.tokens[key]];
    const letters = both.every((token) => /\p{L}/u.test(token)) ? (both.every((token) => /\p{L}{3}/u.test(token)) ? 2.6 : 2) : 1;
    const worth = value * (named >= 0 ? 8 / 4 ** named : key === 0 || key === query ? 0.3 : 1) * letters * (query >= count / 4 ? 1.2 : 1)
      * (isClear(value, visibleKeys(layer, query)) ? 1 : 0.1);
    if (worth > most) [best, most] = [query, worth];
  }
  return best;
}

const NARROW = 860;  // pixels, as in the style sheet: heads come before the story's map

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for the page; any of 2023 or later will do");
  document.documentElement.dataset.title = document.title;
  runs = JSON.parse(await unpackText("results")).map(prepare);
  data = runs[0];
  if (runs.length > 1) state.view = "compare";
  state.row = runs.length > 1 && headChanges().length ? data.rows.indexOf(headChanges()[0].a) : tellingHead();
  startAxes();
  for (const [name, [read]] of Object.entries(KEPT)) START[name] = read();
  state.on = runs.length > 1 ? "text" : proofPiece(chosen());
  state.token = tellingToken(chosen(), await headRows(chosen()));
  if (!embedded) follow(location.hash);
  if (innerWidth <= NARROW) $("glance-fold").open = false;
  drawHeader();
  drawNav();
  showView();
  remember();
  for (const connect of [connectBar, connectHeads, connectTable, connectHead, connectScatter, connectCompare]) connect();
  await redraw();
  dark.addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    requestAnimationFrame(redraw);
  });
  addEventListener("scroll", hideTip, { passive: true });
  addEventListener("keydown", hideTip);
  document.documentElement.dataset.ready = "yes";
  (window.requestIdleCallback ?? setTimeout)(unpackAhead);
}

/** Unpacks what other views draw, while nobody waits for it. */
async function unpackAhead() {
  for (const layer of data.layers) await numbers(layer.maps);
  if (data.similarity) await numbers(data.similarity);
}

start().catch(fault);
