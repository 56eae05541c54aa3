// What is chosen, and the address that keeps it.

const state = {
  view: "heads", run: 0, row: 0, token: 0,
  on: "text",           // or "repeats": a short piece of random tokens that come twice
  direction: "to",      // of the text: "to" where the token looks, "from" who looks at it, "all" received
  scope: "head",        // of the text: the head, or all heads of its layer
  statistic: "label", scale: "root", only: "", filter: "", ranges: undefined,
  settled: false,       // whether a token or a piece was asked for; until then each head shows its own best
};
const views = {};       // name → { title, there(), load(), draw(loaded), more }, in the order of the bar

const chosen = () => data.rows[state.row];
const savedName = () => headShort(chosen());  // of saved pictures
const shownViews = () => Object.entries(views).filter(([, view]) => view.there?.() ?? true);

/** A head's layer on what is looked at: the text, or where there is one, the random piece. */
const sceneOf = (row, on = state.on) => (on === "repeats" && row.of.twin) || row.of;
/** On what a head's first label is proved: random repeats where its figure is of them, else the text. */
const proofPiece = (row) => (row.of.twin && row.labels[0]?.key.endsWith("_random") ? "repeats" : "text");

let turn = 0;           // counts drawings, so that a late one never replaces a newer one

/** Draws the view that is shown. Everything a view shows follows from `data` and `state`. */
async function redraw() {
  const mine = ++turn;
  const view = views[state.view];
  $("views").setAttribute("aria-busy", "true");
  try {
    const loaded = await view.load?.();
    if (mine !== turn) return;
    const focusAgain = heldFocus();
    view.draw(loaded);
    focusAgain();
    $("views").setAttribute("aria-busy", "false");
  } catch (error) {
    fault(error);
  }
}

/** Of a button in a list that is made anew, how to focus the one in its place. */
function heldFocus() {
  const held = document.activeElement;
  const list = held.closest("ol[id], ul[id], table[id]");
  const place = list ? [...list.querySelectorAll("button")].indexOf(held) : -1;
  return () => {
    if (place < 0 || held.isConnected) return;
    const buttons = [...list.querySelectorAll("button")];
    (buttons[place] ?? buttons.at(-1))?.focus({ preventScroll: true });
  };
}

function fault(error) {
  $("fault").hidden = false;
  $("fault").textContent = `The page could not be drawn: ${error.message}`;
  console.error(error);
}

// --- the address -------------------------------------------------------------------------------

/** What an address keeps beside view, head and token, where it is not as at the start: name → [read, write]. */
const KEPT = {
  run: [() => String(state.run), (value) => { if (runs[value]) [state.run, data] = [Number(value), runs[value]]; }],
  on: [() => state.on, (value) => oneOf("on", value, ["text", "repeats"])],
  direction: [() => state.direction, (value) => oneOf("direction", value, ["to", "from", "all"])],
  scope: [() => state.scope, (value) => oneOf("scope", value, ["head", "layer"])],
  statistic: [() => state.statistic, (value) => oneOf("statistic", value, ["label", ...data.column.keys()])],
  scale: [() => state.scale, (value) => oneOf("scale", value, ["root", "linear", "row"])],
  zoom: [() => zoomWords(), (value) => { state.ranges = zoomRanges(value); }],
  sort: [() => (sorting.down ? "-" : "") + sorting.key, (value) => { Object.assign(sorting, { key: value.replace(/^-/, ""), down: value.startsWith("-") }); }],
  maps: [() => mosaic.order, (value) => { if (["layer", "label"].includes(value)) mosaic.order = value; }],
  alike: [() => likeness.order, (value) => { if (["layer", "label", "likeness"].includes(value)) likeness.order = value; }],
  label: [() => state.only, (value) => oneOf("only", value, data.labels)],
  filter: [() => state.filter, (value) => { state.filter = value; }],
  x: [() => axes.x, (value) => { if (data.column.has(value)) axes.x = value; }],
  y: [() => axes.y, (value) => { if (data.column.has(value)) axes.y = value; }],
  change: [() => comparing.key ?? "", (value) => { if (data.column.has(value)) comparing.key = value; }],
  layer: [() => comparing.layer, (value) => { if (/^\d*$/.test(value)) comparing.layer = value; }],
};
const embedded = location.protocol === "about:";  // in a frame of a notebook, which has no address of its own
const START = {};       // what an address leaves out, because the page begins with it

/** What the map of a head is zoomed to, as `2_8_10_16`: the first and the last key, then query, in cells. */
function zoomWords() {
  if (!state.ranges) return "";
  const { xaxis, yaxis: [last, first] } = state.ranges;
  return [...xaxis, first, last].map((end) => +end.toFixed(2)).join("_");
}

function zoomRanges(text) {
  const [left, right, first, last] = text.split("_").map(Number);
  return left >= -0.5 && right > left && first >= -0.5 && last > first ? { xaxis: [left, right], yaxis: [last, first] } : undefined;
}

function oneOf(name, value, allowed) {
  if (allowed.includes(value)) state[name] = value;
}

/** The address of a view of what is chosen. */
function address(view) {
  const kept = new URLSearchParams();
  for (const [name, [read]] of Object.entries(KEPT)) if (read() !== START[name]) kept.set(name, read());
  if (runs.length > 1) kept.set("of", runs.map(({ title }) => title).join(" → "));  // for who reads the link
  return `#${view}/${headShort(chosen())}/${state.token}${kept.size ? `?${kept}` : ""}`;
}

/** Keeps the choice in the address, and in the bar's links. */
function remember() {
  if (!embedded) history.replaceState(null, "", address(state.view));
  for (const link of $("nav").querySelectorAll("a")) link.setAttribute("href", address(link.dataset.view));
  drawBar();
}

const OLD_NAMES = { text: "head" };  // of views in addresses of earlier pages

/** Follows an address such as `#head/3.5/12?scale=row`: view, head, token, and what else it keeps. */
function follow(hash) {
  const [, named, layer, head, token, rest] = hash.match(/^#(\w+)(?:\/(\d+)\.(\d+))?(?:\/(\d+))?(?:\?(.*))?$/) ?? [];
  const view = OLD_NAMES[named] ?? named;
  const kept = new URLSearchParams(rest ?? "");
  const before = [state.on, state.token].join();
  if (layer !== undefined) for (const [name, [, write]] of Object.entries(KEPT)) write(kept.get(name) ?? START[name]);
  if (shownViews().some(([name]) => name === view)) state.view = view;
  const index = rowAt(Number(layer), Number(head));
  if (index >= 0) state.row = index;
  if (token !== undefined) state.token = Number(token);
  state.token = Math.min(state.token, chosenStream().tokens.length - 1);
  const { rows, cols } = sceneOf(chosen());
  if (state.ranges && (state.ranges.xaxis[1] > cols.cells || state.ranges.yaxis[0] > rows.cells)) state.ranges = undefined;
  if (token !== undefined && [state.on, state.token].join() !== before) state.settled = true;
}

// --- choosing ----------------------------------------------------------------------------------

/** Makes row `index` the chosen head, wherever it is shown; −1 and undefined are no row. */
function choose(index) {
  if (!(index >= 0)) return Promise.resolve();
  const before = sceneOf(chosen());
  state.row = index;
  if (!state.settled) state.on = proofPiece(chosen());
  const after = sceneOf(chosen());
  if (before.from !== after.from || before.to !== after.to) {
    state.ranges = undefined;
    if (state.direction === "all" || before.from !== after.from) state.direction = "to";
    state.token = Math.min(state.token, after.from.tokens.length - 1);
  } else if (before.rows.cells !== after.rows.cells || before.cols.cells !== after.cols.cells) state.ranges = undefined;
  $("said").textContent = `${headName(chosen())}: ${allLabels(chosen())}`;
  if (!state.settled) return tellBest();
  remember();
  return redraw();
}

/** Shows the chosen head at the token that tells most of it. */
async function tellBest() {
  const row = chosen();
  state.direction = "to";
  remember();
  $("views").setAttribute("aria-busy", "true");
  const token = tellingToken(row, await headRows(row));
  if (row !== chosen()) return;
  state.token = token;
  remember();
  await redraw();
}

/** Makes a token the chosen one: a query where it looks, a key where others look at it. */
function chooseToken(index, direction = state.direction) {
  state.settled = true;
  state.direction = direction;
  state.token = Math.max(0, Math.min(chosenStream().tokens.length - 1, index));
  remember();
  return redraw();
}

/** Looks at the text, or at random tokens that come twice: there, at a token of the second time. */
function lookOn(on) {
  Object.assign(state, { on, ranges: undefined, settled: true });
  return tellBest();
}

/** The stream that the chosen token is of. */
const chosenStream = () => (state.direction === "to" ? sceneOf(chosen()).from : sceneOf(chosen()).to);
/** The chosen token as a query, where it is one. */
const chosenQuery = () => (state.direction === "to" || chosen().of.kind === "self" ? state.token : -1);

const rowAt = (layer, head) => data.places.get(`${layer}.${head}`) ?? -1;

/** Shows the other of two looks; the same head of it where there is one. */
function showRun(index) {
  const { module, head } = chosen();
  [state.run, data] = [index, runs[index]];
  state.row = data.byName.get(`${module}.${head}`) ?? 0;
  [state.ranges, state.direction, state.only] = [undefined, "to", ""];
  state.token = Math.min(state.token, chosenStream().tokens.length - 1);
  if (!data.column.has(state.statistic)) state.statistic = "label";
  drawHeader();
  drawNav();
  if (!shownViews().some(([name]) => name === state.view)) state.view = "heads";
  showView();
  remember();
  return redraw();
}
