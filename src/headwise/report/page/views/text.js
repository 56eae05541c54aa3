// The text or the image itself: where a token looks, who looks at it, what is received in all.

let textShown;  // the heads whose mean is shown: one, or all of the layer

views.text = {
  get title() { return data.streams.some(({ grid }) => grid) ? "Image" : "Text"; },
  async load() {
    const row = chosen();
    const heads = state.scope === "head" ? [row] : data.rows.filter(({ layer }) => layer === row.layer);
    return Promise.all(heads.map(headRows));
  },
  draw(heads) {
    textShown = heads;
    drawTextTitle();
    drawStreams();
    colourTokens();
  },
};

function drawTextTitle() {
  const row = chosen();
  const layer = row.of;
  const cross = layer.kind === "cross";
  const who = state.scope === "head" ? headName(row) : `Layer ${row.layer}, mean of its ${layer.maps.shape[0]} heads`;
  $("text-title").textContent = who;
  switches($("scopes"), "scope", [["head", "this head"], ["layer", "all heads of the layer"]], state.scope,
    (scope) => { state.scope = scope; redraw(); });
  const directions = [["to", "looks at"], ["from", "is looked at by"], ["all", "received in all"]];
  switches($("directions"), "direction", directions, state.direction, (direction) => {
    if (cross && (direction === "to") !== (state.direction === "to")) state.token = 0;
    chooseToken(state.token, direction);
  });
  const places = layer.from.positions
    ? ` This layer attends over ${whole(layer.from.tokens.length)} places at a time (a window, say), so these are numbers of places.` : "";
  const block = layer.rows.exact && layer.cols.exact ? "" : " Weights beside the strongest keys are means over blocks of tokens (≈).";
  $("text-what").textContent = {
    to: "Choose a token: the others are coloured by the weight it puts on them.",
    from: "Choose a token: the others are coloured by the weight they put on it.",
    all: "Each token is coloured by the attention it received from all queries together.",
  }[state.direction] + places + block;
}

/** The token boxes of the layer's streams, made anew only when these change. */
function drawStreams() {
  const layer = chosen().of;
  const streams = layer.kind === "cross" ? [layer.from, layer.to] : [layer.from];
  const box = $("streams");
  if (box.streams?.length === streams.length && box.streams.every((stream, index) => stream === streams[index])) return;
  box.streams = streams;
  box.replaceChildren(...streams.map((stream, index) => {
    const cross = streams.length > 1;
    const name = cross ? `${stream.name}: ${index ? "looked at" : "looks"}` : stream.name;
    const tokens = stream.grid ? pictureBox(stream) : tokenBox(stream);
    tokens.setAttribute("role", "group");
    tokens.setAttribute("aria-label", `${name}; a button for each ${stream.grid ? "patch" : "token"}; arrow keys move`);
    tokens.dataset.side = index === 0 && cross ? "queries" : index ? "keys" : "both";
    connectTokens(tokens, stream);
    return cross ? el("div", {}, el("h3", {}, name), tokens) : tokens;
  }));
}

function tokenBox(stream) {
  const box = el("div", { class: "tokens" });
  let word = null;
  stream.tokens.forEach((token, index) => {
    // Tokens of a word stay on one line where they fit: a word begins at a space.
    const before = stream.tokens[index - 1] ?? "";
    if (!word || /^\s|\s$/.test(before.slice(-1) + token.slice(0, 1))) box.append(word = el("span"));
    word.append(tokenButton(stream, token, index));
    if (stream.positions) { box.append(" "); word = null; }
    if (token.includes("\n")) { box.append(el("br")); word = null; }
  });
  return box;
}

function tokenButton(stream, token, index) {
  const special = stream.special.includes(index) ? "special" : "";
  const button = el("button", { type: "button", tabindex: -1, "aria-pressed": "false", "data-token": index, class: special });
  for (const part of token.split(/(\n)/)) {
    if (part === "\n") button.append(el("s", {}, "↵"));
    else if (part) button.append(part.trim() ? part.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, visible) : visible(part));
  }
  if (!token) button.append(visible(token));
  return button;
}

/** A picture under the grid of its patches; other tokens stand above it. */
function pictureBox(stream) {
  const [rows, columns] = stream.grid;
  const first = stream.tokens.length - rows * columns;
  const grid = el("div", { class: "patches" });
  grid.style.gridTemplateColumns = `repeat(${columns}, 1fr)`;
  grid.style.maxWidth = `${Math.min(620, Math.round((560 * columns) / rows))}px`;
  if (stream.picture) {
    const picture = el("img", { alt: "The picture that the model was given", src: `data:image/png;base64,${stream.picture}` });
    grid.append(picture);
  }
  const patch = (index) => el("button", {
    type: "button", tabindex: -1, "aria-pressed": "false", "data-token": index, "aria-label": `patch ${stream.tokens[index]}`,
  });
  grid.append(...Array.from({ length: rows * columns }, (_, n) => patch(first + n)));
  const others = el("div", { class: "tokens" });
  for (let index = 0; index < first; index++) others.append(el("span", {}, tokenButton(stream, stream.tokens[index], index)), " ");
  return el("div", { class: "picture" }, ...(first ? [others] : []), grid);
}

function connectTokens(box, stream) {
  const count = stream.tokens.length;
  const direction = () => (box.dataset.side === "both" || (state.direction === "all" && box.dataset.side === "keys") ? state.direction
    : box.dataset.side === "queries" ? "to" : "from");
  box.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button) chooseToken(Number(button.dataset.token), direction());
  });
  box.addEventListener("pointerover", ({ target, clientX, clientY }) => {
    const button = target.closest("button");
    if (!button || coarse.matches) return;
    const index = Number(button.dataset.token);
    const lines = [["token", visible(stream.tokens[index]), `at ${index}`]];
    if (button.dataset.weight) lines.push([{ to: "gets", from: "gives", all: "received" }[state.direction], null, button.dataset.weight]);
    showTip({ clientX, clientY }, lines);
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("keydown", (event) => {
    const at = Number(event.target.closest("button")?.dataset.token);
    const down = stream.grid && at >= count - stream.grid[0] * stream.grid[1] ? stream.grid[1] : 1;
    const step = { ArrowLeft: -1, ArrowUp: -down, ArrowRight: 1, ArrowDown: down }[event.key];
    const goal = { Home: 0, End: count - 1 }[event.key] ?? (step && at + step);
    if (goal === undefined || Number.isNaN(goal)) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(count - 1, goal));
    box.querySelector(`[data-token="${next}"]`).focus();
    chooseToken(next, direction());
  });
}

/** What the boxes show: the weight of the chosen token on each other, the mean over the heads shown. */
function shownWeights() {
  const each = textShown.map((rows) => (state.direction === "all" ? receivedBy(rows) : tokenWeights(rows, state.token, state.direction)));
  return each[0].map((_, index) => each.reduce((sum, weights) => sum + weights[index], 0) / each.length);
}

function colourTokens() {
  const { layer } = textShown[0];
  const weights = shownWeights();
  const most = state.direction === "all" ? Math.max(...weights, 1e-9) : 1;
  const coloured = state.direction === "from" ? "queries" : "keys";
  const picked = state.direction === "to" ? "queries" : "keys";
  for (const box of $("streams").querySelectorAll("[data-side]")) {
    const both = box.dataset.side === "both";
    for (const button of box.querySelectorAll("button")) {
      const index = Number(button.dataset.token);
      const strength = both || box.dataset.side === coloured ? Math.sqrt(weights[index] / most) : 0;
      button.style.setProperty("--w", strength.toFixed(3));
      button.classList.toggle("strong", strength > 0.55);
      button.dataset.weight = both || box.dataset.side === coloured ? weight(weights[index]) : "";
      const here = index === state.token && (both || box.dataset.side === picked);
      button.setAttribute("aria-pressed", String(here));
      button.tabIndex = here || (!both && box.dataset.side !== picked && index === 0) ? 0 : -1;
    }
  }
  drawStrongest(layer, weights);
  keepInSight(picked);
}

/** Scrolls the box, never the page, so that the chosen token is seen. */
function keepInSight(picked) {
  const box = $("streams").querySelector(`.tokens[data-side="${picked}"], .tokens[data-side="both"]`);
  const button = box?.querySelector('[aria-pressed="true"]');
  if (!button) return;
  const [top, bottom] = [button.offsetTop, button.offsetTop + button.offsetHeight];
  if (top < box.scrollTop) box.scrollTop = top - 8;
  else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight + 8;
}

function drawStrongest(layer, weights) {
  const [mine, other] = { to: [layer.from, layer.to], from: [layer.to, layer.from], all: [layer.to, layer.to] }[state.direction];
  const found = [...weights].map((value, index) => [index, value]).filter(([, value]) => value > 0)
    .sort((a, b) => b[1] - a[1]).slice(0, 10);
  const verb = { to: "looks at", from: "is looked at by" }[state.direction];
  $("strongest-title").replaceChildren(...(verb ? [tokenCode(mine, state.token), ` at ${state.token} ${verb}`] : ["What is looked at most"]));
  const exact = layer.rows.exact && layer.cols.exact;
  const tops = new Set(textShown.length > 1 ? [] : state.direction === "to" ? topKeys(textShown[0], state.token).map(([key]) => key)
    : found.map(([query]) => query).filter((query) => topKeys(textShown[0], query).some(([key]) => key === state.token)));
  const about = (index) => !exact && state.direction !== "all" && !tops.has(index);
  const aside = (index) => (verb ? distance(layer, ...(state.direction === "to" ? [state.token, index] : [index, state.token])) : `at ${index}`);
  const next = layer.kind === "cross" ? { to: "from", from: "to", all: "from" }[state.direction] : state.direction;
  $("strongest").replaceChildren(...weightList(other, found, aside, next, about));
}
