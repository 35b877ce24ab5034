/* The views: what there is, graph, times, memory, weights, rounds, curves. Each is a function to elements. */

const chosenGraph = new Map();

/** A choice among models and their graphs; `draw` makes the view of the chosen one. */
function withGraph(usable, draw) {
  const places = page.subjects.flatMap((subject, at) => subject.graphs.map((graph, number) => ({ subject, graph, key: `${at} ${number}` })));
  const choices = places.filter(({ graph }) => usable(graph));
  const holder = el("div", { class: "chosen" });
  const key = choices.some((each) => each.key === chosenGraph.get("now")) ? chosenGraph.get("now") : choices[0].key;
  const show = (wanted) => {
    chosenGraph.set("now", wanted);
    const { subject, graph } = choices.find((each) => each.key === wanted);
    holder.replaceChildren(...draw(graph, subject).filter(Boolean));
    holder.dispatchEvent(new CustomEvent("shown"));
  };
  const select = el("select", { id: "graph-choice", onchange: () => show(select.value) });
  for (const { subject, graph, key: value } of choices) {
    const title = page.subjects.length > 1 ? `${subject.name}: ${graph.name}` : graph.name;
    select.append(el("option", { value }, `${title} (${countText(graph.nodes.length)} nodes)`));
  }
  select.value = key;
  show(key);
  const row = choices.length > 1 ? el("div", { class: "row" }, el("label", { for: "graph-choice" }, "Graph"), select) : null;
  return el("div", { class: "with-graph" }, row, holder);
}

function overview() {
  const parts = page.subjects.map((subject) =>
    card(
      page.subjects.length > 1 ? subject.name : "Model",
      factList(subject.facts),
      subject.graphs.length ? graphTable(subject) : null,
      notes(subject.notes),
    ),
  );
  if (page.notes.length) parts.push(card("Notes", notes(page.notes)));
  return el("div", { class: "page" }, ...parts, el("p", { class: "note" }, `Made by archipel ${page.version}.`));
}

function graphTable(subject) {
  return makeTable(
    [
      { title: "graph", value: (graph) => graph.name },
      { title: "nodes", value: (graph) => graph.nodes.length, show: (graph) => countText(graph.nodes.length), number: true },
      { title: "FLOPs for one example", value: flopsOf, show: (graph) => countText(flopsOf(graph)), number: true },
      { title: "peak of activations", value: (graph) => graph.memory?.peak ?? null, show: (graph) => (graph.memory ? bytesText(graph.memory.peak) : "unknown"), number: true },
      ...(subject.graphs.some((graph) => graph.times)
        ? [{ title: "a pass", value: (graph) => graph.times?.wall_us ?? null, show: (graph) => (graph.times ? timeText(graph.times.wall_us) : "\u2013"), number: true }]
        : []),
    ],
    subject.graphs,
    { caption: `Graphs of ${subject.name}` },
  );
}

function flopsOf(graph) {
  return graph.nodes.reduce((sum, node) => sum + (node.flops ?? 0), 0);
}

// --- graph ------------------------------------------------------------------------------------------------------

const foldings = new Map();

function graphPage() {
  return withGraph(() => true, (graph) => drawGraph(graph));
}

function drawGraph(graph) {
  if (!foldings.has(graph)) foldings.set(graph, new Folding(graph));
  const folding = foldings.get(graph);
  const times = new Map((graph.times?.kernels ?? []).filter((kernel) => kernel.node >= 0).map((kernel) => [kernel.node, kernel]));
  const panel = el("aside", { class: "details", "aria-label": "Details", tabindex: -1 });
  const hint = [el("p", { class: "kind" }, "graph"), el("h2", {}, graph.name), graphHint(graph), notes(graph.notes)];
  panel.append(...hint.filter(Boolean));
  const details = { graph, folding, times, go: (id) => view.goTo(id) };
  const view = new GraphView(folding, (id) => {
    panel.replaceChildren(...describeBox(details, id).filter(Boolean));
    panel.scrollTop = 0;
  });
  const found = el("ul", { class: "found", hidden: true });
  const search = el("input", { type: "search", placeholder: "Search name or operator", "aria-label": "Search nodes by name or operator", id: "search" });
  search.addEventListener("input", () => showFound(search, found, graph, view));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") found.querySelector("button")?.click();
    if (event.key === "ArrowDown") found.querySelector("button")?.focus();
    if (event.key === "Escape") found.hidden = true;
  });
  const tools = el(
    "div",
    { class: "tools", role: "toolbar", "aria-label": "Picture" },
    el("div", { class: "search" }, search, found),
    tool("Fold all", () => (folding.foldAll(), view.draw())),
    tool("Unfold all", () => {
      if (!folding.unfoldAll()) tell(`More than ${MOST_SEEN} nodes are too many for one picture: open scopes one by one.`);
      view.draw();
    }),
    tool("\u2212", () => view.zoom(0.8), "Smaller"),
    tool("+", () => view.zoom(1.25), "Larger"),
    tool("Fit", () => view.fit(0), "Fit the whole graph"),
    colourChoice(graph, view, times),
  );
  requestAnimationFrame(() => view.draw());
  return [el("div", { class: "workspace" }, el("div", { class: "stage" }, tools, view.element), panel)];
}

function tool(text, act, title) {
  return el("button", { type: "button", class: "tool", title, "aria-label": title, onclick: act }, text);
}

function graphHint(graph) {
  const kinds = new Map();
  for (const node of graph.nodes) kinds.set(node.op, (kinds.get(node.op) ?? 0) + 1);
  return el(
    "div",
    {},
    el("p", {}, "Click a scope to open it, a node for what is known of it. With the keyboard: arrows, Enter, Backspace; + \u2212 0 zoom."),
    factList([["nodes", countText(graph.nodes.length)], ["opset", graph.opset || "\u2013"]]),
    makeTable(
      [
        { title: "operator", value: (row) => row[0] },
        { title: "nodes", value: (row) => row[1], number: true },
      ],
      [...kinds],
      { caption: "Operators", sort: 1 },
    ),
  );
}

function showFound(search, found, graph, view) {
  const words = search.value.trim().toLowerCase();
  const matches = [];
  graph.nodes.forEach((node, place) => {
    if (words && matches.length < 50 && view.folding.boxes.has(`n${place}`) && `${node.name} ${node.op}`.toLowerCase().includes(words)) matches.push(place);
  });
  found.hidden = !words;
  found.replaceChildren(
    ...matches.map((place) =>
      el(
        "li",
        {},
        el("button", { type: "button", onclick: () => ((found.hidden = true), view.goTo(`n${place}`)) }, el("b", {}, graph.nodes[place].op), ` ${graph.nodes[place].name}`),
      ),
    ),
    ...(matches.length ? [] : [el("li", { class: "note" }, "nothing found")]),
  );
}

function colourChoice(graph, view, times) {
  const sizes = graph.nodes.map((node) => node.outputs.reduce((sum, at) => sum + (graph.values[at].bytes ?? 0), 0));
  const us = graph.nodes.map((_, place) => times.get(place)?.us ?? 0);
  const ways = { operator: null, size: sizes, work: graph.nodes.map((node) => node.flops ?? 0) };
  if (times.size) ways.time = us;
  const select = el("select", { "aria-label": "Colour by", onchange: choose });
  for (const name of Object.keys(ways)) select.append(el("option", { value: name }, `colour: ${name}`));
  function choose() {
    const numbers = ways[select.value];
    const most = numbers && Math.max(...numbers, 1e-9);
    view.weigh = numbers && ((box) => (box.kind === "node" ? Math.sqrt(numbers[box.place] / most) : null));
    view.draw(view.current);
  }
  return select;
}

// --- times and memory -------------------------------------------------------------------------------------------

function timesPage() {
  if (!anyGraph((graph) => graph.times)) return el("div", { class: "page" }, card("Times", note(NO_TIMES)));
  return el("div", { class: "page" }, withGraph((graph) => graph.times, drawTimes));
}

const NO_TIMES =
  "Times are measured where a model runs, and this server runs none: archipel insight FILE measures them on your machine, " +
  "with the bundle's file. The graph has FLOPs of each node, and the view of memory what a pass needs.";

function drawTimes(graph) {
  const { times } = graph;
  const byOperator = new Map();
  for (const kernel of times.kernels) {
    const sum = byOperator.get(kernel.op) ?? { op: kernel.op, us: 0, calls: 0, share: 0 };
    sum.us += kernel.us;
    sum.share += kernel.share;
    sum.calls += kernel.calls;
    byOperator.set(kernel.op, sum);
  }
  const columns = [
    { title: "time", value: (row) => row.us, show: (row) => timeText(row.us), number: true },
    { title: "share", value: (row) => row.share, show: (row) => shareBar(row.share) },
    { title: "calls", value: (row) => row.calls, show: (row) => numberText(row.calls), number: true },
  ];
  const inKernels = times.kernels.reduce((sum, kernel) => sum + kernel.us, 0);
  return [
    card(
      `Times of ${graph.name}`,
      factList([
        ["a pass", timeText(times.wall_us)],
        ["in kernels", timeText(inKernels)],
        ["medians over", `${times.runs} passes`],
        ["machine", `${times.machine}, ${times.threads} ${times.threads === 1 ? "thread" : "threads"}`],
      ]),
      notes(times.assumed),
    ),
    card("By operator", makeTable([{ title: "operator", value: (row) => row.op }, ...columns], [...byOperator.values()], { caption: "Time by operator", sort: 1 })),
    card(
      "By node",
      note("ONNX Runtime joins nodes: the time of what has no row of its own is in the row of another one."),
      makeTable(
        [{ title: "node", value: (row) => row.name }, { title: "operator", value: (row) => row.op }, ...columns],
        times.kernels,
        { caption: "Time by node", sort: 2, filter: (row) => `${row.name} ${row.op}` },
      ),
    ),
  ];
}

function memoryPage() {
  return el("div", { class: "page" }, withGraph((graph) => graph.memory, drawMemory));
}

function drawMemory(graph) {
  const { memory } = graph;
  const peak = memory.steps[memory.peak_step];
  const series = [{ name: "activations", steps: memory.steps.map((_, at) => at + 1), values: memory.steps.map(([, bytes]) => bytes) }];
  // So that the last step has a width, too.
  const drawn = series.map((each) => ({ ...each, steps: [...each.steps, each.steps.length + 1], values: [...each.values, each.values[each.values.length - 1]] }));
  return [
    card(
      `Memory of ${graph.name}`,
      factList([
        ["peak of activations", bytesText(memory.peak)],
        ["reached at", peak ? `step ${memory.peak_step + 1}: ${nodeTitle(graph, peak[0])}` : "\u2013"],
        ["inputs", bytesText(memory.inputs)],
        ["weights and constants", bytesText(memory.weights)],
        ["all together", bytesText(memory.peak + memory.inputs + memory.weights)],
        ["batch", `${memory.batch}: so much every symbolic dimension counts`],
      ]),
      lineChart(drawn, { x: "step", y: bytesText, stepped: true, label: "Bytes of activations that are alive" }),
      memory.unknown ? note(`${countText(memory.unknown)} values have no known size, and count nothing: what is needed is more.`) : null,
      note("From the shapes, in the order in which ONNX Runtime runs the nodes; kernels' scratch space is not counted."),
    ),
    card(
      "Alive at the peak",
      makeTable(
        [
          { title: "value", value: ([at]) => graph.values[at].name },
          { title: "type", value: ([at]) => typeText(graph.values[at]) },
          { title: "bytes", value: ([, bytes]) => bytes, show: ([, bytes]) => bytesText(bytes), number: true },
        ],
        memory.alive,
        { caption: "Values that are alive at the peak" },
      ),
    ),
  ];
}

// --- weights, rounds, curves ------------------------------------------------------------------------------------

function weightsPage() {
  return el("div", { class: "page" }, ...page.subjects.filter((subject) => subject.tensors.length).map(drawWeights));
}

function drawWeights(subject) {
  const place = el("div", { class: "chosen-tensor", tabindex: -1 });
  const show = (tensor, move = true) => {
    place.replaceChildren(el("h3", {}, tensor.name), histogram(tensor.statistics, tensor.name, 560, 130));
    if (move) place.focus();
  };
  const statistic = (name) => ({ title: name, value: (row) => row.statistics[name], show: (row) => numberText(row.statistics[name]), number: true });
  const table = makeTable(
    [
      { title: "tensor", value: (row) => row.name },
      { title: "type", value: (row) => row.dtype },
      { title: "shape", value: (row) => shapeText(row.shape) },
      { title: "bytes", value: (row) => row.bytes, show: (row) => bytesText(row.bytes), number: true },
      statistic("mean"),
      statistic("deviation"),
      statistic("low"),
      statistic("high"),
      { title: "zeros", value: (row) => row.statistics.zeros, show: (row) => shareText(row.statistics.zeros), number: true },
    ],
    subject.tensors,
    { caption: `Tensors of ${subject.name}`, filter: (row) => row.name, onrow: show },
  );
  const largest = subject.tensors.reduce((a, b) => (b.statistics.counts.length && b.bytes > a.bytes ? b : a));
  show(largest, false);
  return card(page.subjects.length > 1 ? `Weights of ${subject.name}` : "Weights", table, place);
}

/** Histograms over the versions: those of the page, or those that have to be fetched for each version. */
function roundsPage() {
  if (!versions.length || page.histograms.length) return drawRounds();
  const told = el("p", { class: "note", role: "status" }, "");
  const place = el("div", { class: "page" }, card("Weights over the versions", told));
  fetchHistograms((text) => (told.textContent = text)).then(
    (found) => {
      page.histograms = found;
      if (place.isConnected) place.replaceWith(found.length ? drawRounds() : card("Weights over the versions", note("No version has weights that can be shown.")));
    },
    (error) => (told.textContent = error.message),
  );
  return place;
}

function drawRounds() {
  const kinds = [...new Set(page.histograms.map((series) => series.kind))];
  return el(
    "div",
    { class: "page" },
    ...kinds.map((kind) =>
      card(
        `${kind[0].toUpperCase()}${kind.slice(1)} over the versions`,
        ...page.histograms.filter((series) => series.kind === kind).map((series, at) => {
          const holder = el("details", { open: at < 4 }, el("summary", {}, series.name));
          const draw = () => holder.children.length < 2 && holder.append(hills(series));
          if (at < 4) draw();
          holder.addEventListener("toggle", draw);
          return holder;
        }),
      ),
    ),
  );
}

function curvesPage() {
  const groups = [...new Set(page.curves.map((curve) => curve.group))];
  const runs = new Set(page.curves.map((curve) => curve.run));
  return el(
    "div",
    { class: "page curves" },
    ...groups.map((group) => {
      const curves = page.curves.filter((each) => each.group === group);
      const series = curves.map((each) => ({ ...each, name: runs.size > 1 && each.run ? `${each.name} (${each.run})` : each.name }));
      const left = curves.reduce((sum, each) => sum + (each.left_out ?? 0), 0);
      return card(group, lineChart(series, { x: curves[0].x, label: group }), left ? note(`${countText(left)} points between those that are shown are left out.`) : null);
    }),
  );
}
