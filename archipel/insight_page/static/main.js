/* Which views there are, and which one is shown: the part of the address after #. */

const anyGraph = (has) => page.subjects.some((subject) => subject.graphs.some(has));

const VIEWS = [
  ["overview", "Overview", page.subjects.length > 0 || page.notes.length > 0, overview],
  ["comparison", "Comparison", page.comparison !== null, comparisonPage],
  ["graph", "Graph", anyGraph(() => true), graphPage],
  ["times", "Times", anyGraph((graph) => graph.times) || (served.page && anyGraph(() => true)), timesPage],
  ["memory", "Memory", anyGraph((graph) => graph.memory), memoryPage],
  ["weights", "Weights", page.subjects.some((subject) => subject.tensors.length), weightsPage],
  ["rounds", "Histograms", page.histograms.length > 0 || versions.length > 0, roundsPage],
  ["curves", "Curves", page.curves.length > 0, curvesPage],
].filter(([, , there]) => there);

function firstView() {
  if (page.comparison) return "comparison";
  if (anyGraph(() => true)) return "graph";
  return page.curves.length ? "curves" : VIEWS[0][0];
}

function showView(move) {
  const wanted = location.hash.slice(1);
  const [name, title, , draw] = VIEWS.find(([each]) => each === wanted) ?? VIEWS.find(([each]) => each === firstView());
  for (const link of document.querySelectorAll("#views a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const main = document.getElementById("view");
  main.setAttribute("aria-label", title);
  document.body.dataset.view = name;
  main.replaceChildren(draw());
  if (move) main.focus();
}

document.getElementById("views").append(...VIEWS.map(([name, title]) => el("a", { href: `#${name}` }, title)));
window.addEventListener("hashchange", () => showView(true));
window.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  const search = document.getElementById("search");
  if (event.key === "/" && !typing && search) {
    search.focus();
    event.preventDefault();
  }
});
showView(false);
