// The chosen head's attention: its map, and the text coloured by where it looks.

let map = [];      // the chosen head's weights, rows are queries
let drawn = 0;     // counts requests, so that a late map never replaces a newer one

async function drawAttention() {
  const turn = ++drawn;
  const { layer, head } = chosen();
  const next = await headMap(layer, head);
  if (turn !== drawn) return;
  map = next;
  $("attention-title").textContent = `Where layer ${layer}, head ${head} looks`;
  drawMap();
  colourTokens();
}

const shade = (value) => (state.scale === "root" ? Math.sqrt(value) : value);

function drawMap() {
  const plot = $("attention");
  const width = plot.clientWidth;
  const narrow = width < 420;
  const margin = { l: narrow ? 62 : 84, r: narrow ? 40 : 48, t: 4, b: narrow ? 74 : 92 };
  const marks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
  const ticks = state.scale === "root" ? marks : [0, 0.25, 0.5, 0.75, 1];
  const trace = {
    type: "heatmap", z: map.map((line) => line.map((value) => (value === null ? null : shade(value)))),
    zmin: 0, zmax: 1, colorscale: "Viridis", hoverinfo: "none", hoverongaps: false,
    colorbar: colourBar({ tickvals: ticks.map(shade), ticktext: ticks.map(String) }),
  };
  const range = state.ranges ?? wholeRanges();
  const axis = (name) => ({
    range: range[name], fixedrange: coarse.matches, tickangle: name === "xaxis" ? -60 : 0, ...tokenTicks(range[name], width - 130, narrow ? 6 : 10),
    tickfont: { family: css("--mono"), size: 11, color: css("--muted") },
  });
  const layout = plotLayout({
    width, height: width - margin.l - margin.r + margin.t + margin.b, margin, dragmode: coarse.matches ? false : "zoom",
    xaxis: { ...axis("xaxis"), title: { text: "key: looked at" } },
    yaxis: { ...axis("yaxis"), title: { text: "query: looks" } },
    shapes: [tokenShape()],
  });
  Plotly.react(plot, [trace], layout, plotOptions);
  plot.setAttribute("aria-label",
    `Attention map of ${headName(chosen())}, ${data.side} by ${data.side}; the text beside it shows the same by token`);
}

function wholeRanges() {
  return { xaxis: [-0.5, data.side - 0.5], yaxis: [data.side - 0.5, -0.5] };
}

/** As many tick labels as can be read in `room` pixels over the visible range, of `most` letters. */
function tokenTicks(range, room, most) {
  const [low, high] = [Math.max(0, Math.ceil(Math.min(...range))), Math.min(data.side - 1, Math.floor(Math.max(...range)))];
  const step = Math.max(1, Math.ceil((high - low + 1) / Math.max(4, room / 15)));
  const cells = [];
  for (let cell = Math.ceil(low / step) * step; cell <= high; cell += step) cells.push(cell);
  return { tickvals: cells, ticktext: cells.map((cell) => label(data.tokens[tokensOf(cell)[0]], most)) };
}

/** A line along the chosen token: its row as a query, its column as a key. */
function tokenShape() {
  const cell = cellOf(state.token);
  const across = { x0: -0.5, x1: cell + 0.5, y0: cell - 0.5, y1: cell + 0.5 };
  const down = { x0: cell - 0.5, x1: cell + 0.5, y0: cell - 0.5, y1: data.side - 0.5 };
  return { type: "rect", ...(state.direction === "to" ? across : down), line: { color: css("--mark"), width: 1.5 } };
}

function connectAttention() {
  const plot = $("attention");
  plot.on("plotly_hover", ({ event, points: [{ x, y }] }) => showTip(event, [
    ["query", cellLabel(y), `at ${cellPlace(y)}`], ["key", cellLabel(x), `at ${cellPlace(x)}`],
    ["weight", null, weight(map[y][x])],
  ]));
  plot.on("plotly_unhover", hideTip);
  plot.on("plotly_click", ({ points: [{ x, y }] }) => chooseToken(tokensOf(state.direction === "to" ? y : x)[0]));
  plot.on("plotly_relayout", (change) => {
    if (!("xaxis.range[0]" in change || "yaxis.range[0]" in change)) return;
    state.ranges = { xaxis: [...plot.layout.xaxis.range], yaxis: [...plot.layout.yaxis.range] };
    $("zoom-out").disabled = false;
    drawMap();
  });
  const whole = () => {
    state.ranges = undefined;
    $("zoom-out").disabled = true;
    drawMap();
  };
  $("zoom-out").addEventListener("click", whole);
  plot.on("plotly_doubleclick", whole);
  for (const name of ["scale", "direction"]) {
    for (const input of document.getElementsByName(name)) {
      input.addEventListener("change", () => { state[name] = input.value; drawMap(); colourTokens(); });
    }
  }
}

function drawTokens() {
  const box = $("tokens");
  let word = null;
  data.tokens.forEach((token, index) => {
    // Tokens of a word stay on one line where they fit: a word begins at a space.
    if (!word || /^\s|\s$/.test(data.tokens[index - 1]?.slice(-1) + token.slice(0, 1))) box.append(word = el("span"));
    word.append(tokenButtonFor(token, index));
    if (token.includes("\n")) { box.append(el("br")); word = null; }
  });
  box.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button) chooseToken(Number(button.dataset.token));
  });
  box.addEventListener("pointerover", ({ target, clientX, clientY }) => {
    const button = target.closest("button");
    if (!button || coarse.matches) return;
    const other = Number(button.dataset.token);
    showTip({ clientX, clientY }, [["token", visible(data.tokens[other]), `at ${other}`],
      [state.direction === "to" ? "gets" : "gives", null, weight(weightWith(other))]]);
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const goal = { Home: 0, End: data.tokens.length - 1 }[event.key] ?? (step && state.token + step);
    if (goal === undefined) return;
    event.preventDefault();
    chooseToken(Math.max(0, Math.min(data.tokens.length - 1, goal)));
    tokenButton(state.token).focus();
  });
}

function tokenButtonFor(token, index) {
  const button = el("button", { type: "button", tabindex: -1, "aria-pressed": "false", "data-token": index });
  for (const part of token.split(/(\n)/)) {
    if (part === "\n") button.append(el("s", {}, "↵"));
    else if (part) button.append(part.trim() ? part.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, visible) : visible(part));
  }
  return button;
}

const tokenButton = (index) => $("tokens").querySelector(`[data-token="${index}"]`);

function chooseToken(index) {
  state.token = index;
  Plotly.relayout($("attention"), { shapes: [tokenShape()] });
  colourTokens();
  const [box, button] = [$("tokens"), tokenButton(index)];
  const [top, bottom] = [button.offsetTop, button.offsetTop + button.offsetHeight];
  if (top < box.scrollTop) box.scrollTop = top - 8;
  else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight + 8;
}

/** The weight between the chosen token and another, in the chosen direction. */
function weightWith(other) {
  const [mine, its] = [cellOf(state.token), cellOf(other)];
  return (state.direction === "to" ? map[mine][its] : map[its][mine]) ?? 0;
}

function colourTokens() {
  for (const button of $("tokens").querySelectorAll("button")) {
    const index = Number(button.dataset.token);
    const strength = shade(weightWith(index));
    button.style.setProperty("--w", strength.toFixed(3));
    button.classList.toggle("strong", strength > 0.55);
    button.setAttribute("aria-pressed", String(index === state.token));
    button.tabIndex = index === state.token ? 0 : -1;
  }
  drawStrongest();
}

function drawStrongest() {
  const cell = cellOf(state.token);
  const found = map.map((line, other) => [other, (state.direction === "to" ? map[cell][other] : line[cell]) ?? 0])
    .filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]).slice(0, 6);
  $("strongest-title").replaceChildren(el("code", { class: "token" }, cellLabel(cell)),
    ` at ${cellPlace(cell)} ${state.direction === "to" ? "looks at" : "is looked at by"}`);
  $("strongest").replaceChildren(...found.map(([other, value]) => {
    const gap = Math.abs(cellStart(cell) - cellStart(other));
    const where = gap === 0 ? "itself" : `${gap} ${state.direction === "to" ? "back" : "on"}`;
    return el("li", {}, el("b", {}, weight(value)), el("span", {}, el("code", { class: "token" }, cellLabel(other))), el("small", {}, where));
  }));
}
