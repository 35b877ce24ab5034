/* Two models side by side. */

function comparisonPage() {
  const { comparison } = page;
  const [a, b] = page.subjects;
  return el(
    "div",
    { class: "page" },
    card("Side by side", sideBySide(comparison, a, b), notes([...comparison.notes, ...timesTold(comparison, a, b)])),
    comparison.outputs.length ? card("Values on the same inputs", outputTable(comparison, b), notes(comparison.assumed)) : null,
    card("Graph", graphChanges(comparison, a, b)),
    comparison.tensors.length ? card("Weights", tensorTable(comparison, a, b)) : null,
    timeTable(comparison, a, b),
  );
}

function sideBySide(comparison, a, b) {
  const [first, second] = [a.graphs[comparison.graph_a], b.graphs[comparison.graph_b]];
  const weights = (subject) => subject.tensors.reduce((sum, tensor) => sum + tensor.bytes, 0);
  const rows = [
    ["nodes", first.nodes.length, second.nodes.length, countText],
    ["bytes of tensors", weights(a), weights(b), bytesText],
    ["FLOPs for one example", flopsOf(first), flopsOf(second), countText],
    ["peak of activations", first.memory?.peak, second.memory?.peak, bytesText],
    ["a pass", first.times?.wall_us, second.times?.wall_us, timeText],
  ].filter(([, ...numbers]) => numbers.slice(0, 2).some((number) => number !== undefined && number !== null));
  const show = (number, text) => (number === undefined || number === null ? "\u2013" : text(number));
  return makeTable(
    [
      { title: "of the two", value: (row) => row[0] },
      { title: a.name, value: (row) => row[1] ?? null, show: (row) => show(row[1], row[3]), number: true },
      { title: b.name, value: (row) => row[2] ?? null, show: (row) => show(row[2], row[3]), number: true },
      { title: "ratio", value: (row) => row[2] / row[1] || null, show: (row) => (row[1] && row[2] ? numberText(row[2] / row[1], 3) : "\u2013"), number: true },
    ],
    rows,
    { caption: `${first.name} of ${a.name}, ${second.name} of ${b.name}` },
  );
}

function timesTold(comparison, a, b) {
  const both = a.graphs[comparison.graph_a].times && b.graphs[comparison.graph_b].times;
  return both ? ["times were measured one after the other: a machine that was busy at one of them makes a difference"] : [];
}

function outputTable(comparison, b) {
  return makeTable(
    [
      { title: "value", value: (row) => row.name },
      { title: `in ${b.name}`, value: (row) => row.counterpart },
      { title: "computed by", value: (row) => row.layer },
      { title: "output", value: (row) => (row.output ? "yes" : "") },
      { title: "SNR, dB", value: (row) => (row.equal ? Infinity : row.snr_db), show: (row) => (row.equal ? "equal" : numberText(row.snr_db, 3)), number: true },
      { title: "cosine", value: (row) => row.cosine, show: (row) => numberText(row.cosine, 6), number: true },
      { title: "largest difference", value: (row) => row.largest, show: (row) => numberText(row.largest), number: true },
      { title: "remark", value: (row) => row.what },
    ],
    comparison.outputs,
    { caption: `Values that both compute, on ${comparison.examples} examples`, filter: (row) => `${row.name} ${row.layer}` },
  );
}

function graphChanges(comparison, a, b) {
  const words = { added: `only in ${b.name}`, removed: `only in ${a.name}`, changed: "in both, differently" };
  if (!comparison.nodes.length) return note(`The graphs are equal: ${countText(comparison.same)} nodes with the same names, operators, inputs and attributes.`);
  return el(
    "div",
    {},
    note(`${countText(comparison.same)} nodes are equal.`),
    makeTable(
      [
        { title: "node", value: (row) => row.name },
        { title: "operator", value: (row) => row.op },
        { title: "where", value: (row) => words[row.kind] },
        { title: "how", value: (row) => (row.what ?? []).join("; ") },
      ],
      comparison.nodes,
      { caption: "Nodes that differ", filter: (row) => `${row.name} ${row.op} ${row.kind}` },
    ),
  );
}

function tensorTable(comparison, a, b) {
  const number = (title, key) => ({ title, value: (row) => row[key] ?? null, show: (row) => numberText(row[key]), number: true });
  return makeTable(
    [
      { title: "tensor", value: (row) => row.name },
      { title: a.name, value: (row) => row.bytes_a, show: (row) => (row.shape_a ? `${shapeText(row.shape_a)}, ${bytesText(row.bytes_a)}` : "\u2013") },
      { title: b.name, value: (row) => row.bytes_b, show: (row) => (row.shape_b ? `${shapeText(row.shape_b)}, ${bytesText(row.bytes_b)}` : "\u2013") },
      number("distance", "distance"),
      number("of the norm", "relative"),
      number("cosine", "cosine"),
      number("largest", "largest"),
      { title: "remark", value: (row) => row.what ?? "" },
    ],
    comparison.tensors,
    { caption: "Distance of each tensor (L2 norm of the difference)", filter: (row) => row.name },
  );
}

function timeTable(comparison, a, b) {
  const sums = [a.graphs[comparison.graph_a], b.graphs[comparison.graph_b]].map((graph) => {
    const found = new Map();
    for (const kernel of graph.times?.kernels ?? []) found.set(kernel.op, (found.get(kernel.op) ?? 0) + kernel.us);
    return found;
  });
  if (!sums[0].size || !sums[1].size) return null;
  const rows = [...new Set([...sums[0].keys(), ...sums[1].keys()])].map((op) => ({ op, a: sums[0].get(op) ?? null, b: sums[1].get(op) ?? null }));
  const time = (name, key) => ({ title: name, value: (row) => row[key], show: (row) => (row[key] === null ? "\u2013" : timeText(row[key])), number: true });
  return card("Times", makeTable([{ title: "operator", value: (row) => row.op }, time(a.name, "a"), time(b.name, "b")], rows, { caption: "Time by operator", sort: 1 }));
}
