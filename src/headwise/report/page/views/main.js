// The start: unpack, choose, draw the view that the address names.

/** The head to begin with: the surest of the first rule that names any. */
function tellingHead() {
  for (const { label, sign } of data.rules) {
    let [best, most] = [-1, -Infinity];
    data.rows.forEach((row, index) => {
      const found = row.labels.find((one) => one.label === label);
      const score = found && (sign === "≤" ? -found.score : found.score);
      if (found && score > most) [best, most] = [index, score];
    });
    if (best >= 0) return best;
  }
  return 0;
}

/** A query worth showing first: far into the text, with much weight on one key in between. */
function tellingToken({ layer, map, ...rest }) {
  const count = layer.from.tokens.length;
  let [best, most] = [count - 1, 0];
  for (let query = count >> 1; query < count; query++) {
    const [key, value] = topKeys(rest, query)[0] ?? [0, 0];
    if (key > 0 && key !== query && value > most) [best, most] = [query, value];
  }
  return best;
}

async function start() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for the page; any of 2023 or later will do");
  document.documentElement.dataset.title = document.title;
  const code = unpackText("plotly");
  runs = JSON.parse(await unpackText("results")).map(prepare);
  data = runs[0];
  if (runs.length > 1) state.view = "compare";
  state.row = tellingHead();
  state.token = tellingToken(await headRows(chosen()));
  follow(location.hash);
  drawHeader();
  drawNav();
  showView();
  remember();
  await new Promise((done) => setTimeout(done));  // so that this is seen while Plotly starts
  const script = el("script");
  script.textContent = await code;
  document.head.append(script);
  for (const connect of [connectBar, connectHeads, connectTable, connectHead, connectScatter]) connect();
  await redraw();
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

start().catch(fault);
