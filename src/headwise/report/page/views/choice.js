// What is chosen (view, head, token), the address that keeps it, and the bar that shows it.

const state = {
  view: "heads", run: 0, row: 0, token: 0,
  direction: "to",      // of the text: "to" where the token looks, "from" who looks at it, "all" received
  scope: "head",        // of the text: the head, or all heads of its layer
  statistic: "label", scale: "root", only: "", ranges: undefined,
};
const views = {};       // name → { title, there(), load(), draw(loaded) }, in the order of the bar

const chosen = () => data.rows[state.row];
const shownViews = () => Object.entries(views).filter(([, view]) => view.there?.() ?? true);

let turn = 0;           // counts drawings, so that a late one never replaces a newer one

/** Draws the view that is shown. Everything a view shows follows from `data` and `state`. */
async function redraw() {
  const mine = ++turn;
  const view = views[state.view];
  $("views").setAttribute("aria-busy", "true");
  try {
    const loaded = await view.load?.();
    if (mine !== turn) return;
    view.draw(loaded);
    $("views").setAttribute("aria-busy", "false");
  } catch (error) {
    fault(error);
  }
}

function fault(error) {
  $("fault").hidden = false;
  $("fault").textContent = `The page could not be drawn: ${error.message}`;
  console.error(error);
}

const address = (view) => `#${view}/${headShort(chosen())}/${state.token}`;

/** Keeps the choice in the address, and in the bar's links. */
function remember() {
  history.replaceState(null, "", address(state.view));
  for (const link of $("nav").querySelectorAll("a")) link.setAttribute("href", address(link.dataset.view));
  drawBar();
}

/** Makes row `index` the chosen head, wherever it is shown; −1 and undefined are no row. */
function choose(index) {
  if (!(index >= 0)) return Promise.resolve();
  const before = chosen().of;
  state.row = index;
  const after = chosen().of;
  if (before.queries !== after.queries || before.keys !== after.keys) {
    state.ranges = undefined;
    if (state.direction === "all" || before.queries !== after.queries) state.direction = "to";
    state.token = Math.min(state.token, after.from.tokens.length - 1);
  } else if (before.rows.cells !== after.rows.cells || before.cols.cells !== after.cols.cells) state.ranges = undefined;
  $("said").textContent = `${headName(chosen())}: ${allLabels(chosen())}`;
  remember();
  return redraw();
}

/** Makes a token the chosen one: a query where it looks, a key where others look at it. */
function chooseToken(index, direction = state.direction) {
  state.direction = direction;
  state.token = Math.max(0, Math.min(chosenStream().tokens.length - 1, index));
  remember();
  return redraw();
}

/** The stream that the chosen token is of. */
const chosenStream = () => (state.direction === "to" ? chosen().of.from : chosen().of.to);
/** The chosen token as a query, where it is one. */
const chosenQuery = () => (state.direction === "to" || chosen().of.kind === "self" ? state.token : -1);

const rowAt = (layer, head) => data.places.get(`${layer}.${head}`) ?? -1;

/** Follows an address such as `#head/3.5/12`: view, head and token. */
function follow(hash) {
  const [, view, layer, head, token] = hash.match(/^#(\w+)(?:\/(\d+)\.(\d+))?(?:\/(\d+))?$/) ?? [];
  if (shownViews().some(([name]) => name === view)) state.view = view;
  const index = rowAt(Number(layer), Number(head));
  if (index >= 0) state.row = index;
  if (token !== undefined) state.token = Math.min(Number(token), chosenStream().tokens.length - 1);
}

/** Shows the view of the state, hides the others. */
function showView() {
  for (const name of Object.keys(views)) $(`view-${name}`).hidden = name !== state.view;
  for (const link of $("nav").querySelectorAll("a")) {
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${views[state.view].title}: ${document.documentElement.dataset.title}`;
}

function drawBar() {
  const row = chosen();
  $("bar-head").textContent = headShort(row);
  $("bar-head").setAttribute("href", address("head"));
  $("bar-head").setAttribute("aria-label", `${headName(row)}: ${allLabels(row)}; show it`);
  const mark = el("i", { class: "swatch" });
  mark.style.background = labelColour(firstLabel(row));
  $("bar-label").replaceChildren(mark, firstLabel(row), row.labels.length > 1 ? ` +${row.labels.length - 1}` : "");
}

function drawNav() {
  $("nav").replaceChildren(...shownViews().map(([name, { title }]) => el("a", { "data-view": name, href: `#${name}` }, title)));
  $("run").hidden = runs.length === 1;
  const names = runs.map((run, index) => [String(index), "AB"[index], `${"AB"[index]}: ${run.title}`]);
  switches($("run"), "run", names, String(state.run), (index) => showRun(Number(index)));
}

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

function connectBar() {
  $("previous-head").addEventListener("click", () => choose((state.row || data.rows.length) - 1));
  $("next-head").addEventListener("click", () => choose((state.row + 1) % data.rows.length));
  addEventListener("hashchange", () => {
    follow(location.hash);
    showView();
    remember();
    hideTip();
    scrollTo({ top: Math.min(scrollY, $("bar").offsetTop) });
    redraw();
  });
}
