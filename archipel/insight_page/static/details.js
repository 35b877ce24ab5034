/* What is known of a node, a scope or a value, beside the picture. */

/** view: {graph, folding, go: id of a box -> void, times: Map of a node's place -> kernel} */
function describeBox(view, id) {
  const box = view.folding.boxes.get(id);
  if (box.kind === "node") return describeNode(view, box);
  if (box.kind === "scope") return describeScope(view, box);
  const value = view.graph.values[box.value];
  return [
    el("p", { class: "kind" }, box.kind === "input" ? "input of the graph" : "output of the graph"),
    el("h2", {}, value.name),
    valueFacts(view, box.value),
  ];
}

function describeNode(view, box) {
  const { graph } = view;
  const { node } = box;
  const scope = view.folding.boxes.get(box.parent);
  const facts = [["name", node.name || "\u2013"]];
  if (node.domain && node.domain !== "ai.onnx") facts.push(["domain", node.domain]);
  if (scope !== view.folding.root) facts.push(["scope", goButton(view, scope.id, view.folding.path(scope.id))]);
  if (node.flops) facts.push(["FLOPs", `${countText(node.flops)} for one example`]);
  const kernel = view.times?.get(box.place);
  if (kernel) facts.push(["time", `${timeText(kernel.us)}, ${shareText(kernel.share)} of the pass`]);
  const parts = [el("p", { class: `kind ${family(node.op)}` }, "operator"), el("h2", {}, node.op), factList(facts)];
  const attributes = node.attributes ?? [];
  if (attributes.length) {
    parts.push(el("h3", {}, "Attributes"), factList(attributes.map(([name, kind, text]) => [name, el("span", { title: kind }, text)])));
  }
  parts.push(el("h3", {}, "Reads"), ...valueList(view, node.inputs, false));
  parts.push(el("h3", {}, "Gives"), ...valueList(view, node.outputs, true));
  return parts;
}

function describeScope(view, box) {
  const { graph, folding } = view;
  const places = [];
  const waiting = [box.id];
  while (waiting.length) {
    const each = folding.boxes.get(waiting.pop());
    if (each.kind === "node") places.push(each.place);
    else waiting.push(...each.children);
  }
  const operators = new Map();
  let flops = 0;
  let time = 0;
  const weights = new Set();
  for (const place of places) {
    const node = graph.nodes[place];
    operators.set(node.op, (operators.get(node.op) ?? 0) + 1);
    flops += node.flops ?? 0;
    time += view.times?.get(place)?.us ?? 0;
    for (const at of node.inputs) if (at >= 0 && graph.values[at].kind === "weight") weights.add(at);
  }
  const bytes = [...weights].reduce((sum, at) => sum + (graph.values[at].bytes ?? 0), 0);
  const facts = [["nodes", countText(box.nodes)], ["weights", `${weights.size}, ${bytesText(bytes)}`]];
  if (flops) facts.push(["FLOPs", `${countText(flops)} for one example`]);
  if (time) facts.push(["time", timeText(time)]);
  const rows = [...operators].map(([op, count]) => ({ op, count }));
  return [
    el("p", { class: "kind" }, "scope"),
    el("h2", {}, folding.path(box.id) || graph.name),
    factList(facts),
    makeTable(
      [
        { title: "operator", value: (row) => row.op },
        { title: "nodes", value: (row) => row.count, number: true },
      ],
      rows,
      { caption: "Operators in it", sort: 1 },
    ),
  ];
}

function valueList(view, places, given) {
  // The first weight is open: it is mostly what is looked for.
  const first = places.find((at) => at >= 0 && view.graph.values[at].statistics?.counts.length);
  return places.map((at, number) => {
    if (at < 0) return el("p", { class: "note" }, `${number + 1}: left out`);
    const value = view.graph.values[at];
    return el(
      "details",
      { class: "value", open: at === first },
      el("summary", {}, el("span", { class: "label" }, value.name || "no name"), el("span", { class: "type" }, typeText(value))),
      valueFacts(view, at, given),
    );
  });
}

function valueFacts(view, at, given = true) {
  const { graph, folding } = view;
  const value = graph.values[at];
  const pairs = [["kind", value.role ? `${value.kind} (role ${value.role})` : value.kind]];
  pairs.push(["type", typeText(value)], ["size", bytesText(value.bytes)]);
  if (value.producer >= 0 && !given && folding.boxes.has(`n${value.producer}`)) pairs.push(["made by", goButton(view, `n${value.producer}`, nodeTitle(graph, value.producer))]);
  const readers = [...new Set(folding.consumers[at])];
  if (readers.length) {
    const shown = readers.slice(0, 30).map((place) => goButton(view, `n${place}`, nodeTitle(graph, place)));
    if (readers.length > 30) shown.push(el("span", {}, `and ${readers.length - 30} more`));
    pairs.push(["goes to", el("span", { class: "links" }, ...shown)]);
  }
  if (graph.outputs.includes(at)) pairs.push(["also", "an output of the graph"]);
  const parts = [factList(pairs)];
  if (value.statistics) parts.push(histogram(value.statistics, value.name));
  return el("div", {}, ...parts);
}

function nodeTitle(graph, place) {
  const node = graph.nodes[place];
  const name = shortName(node);
  return name === node.op ? name : `${node.op} ${name}`;
}

function goButton(view, id, text) {
  return el("button", { type: "button", class: "link", onclick: () => view.go(id) }, text);
}
