/* Where boxes and lines are: sizes from their texts, places by dagre. */

const FAMILIES = [
  ["product", /^(Conv|ConvTranspose|ConvInteger|QLinearConv|Gemm|MatMul|MatMulInteger|QLinearMatMul|Einsum|LSTM|GRU|RNN|Attention)$/],
  ["activation", /(Relu|Sigmoid|Tanh|Softmax|Softplus|Elu|Selu|Gelu|HardSwish|Mish|Swish|Erf)$/],
  ["normal", /Norm(alization)?$/],
  ["pool", /(Pool|Resize|Upsample|Pad|RoiAlign|GridSample|DepthToSpace|SpaceToDepth)/],
  ["shape", /^(Reshape|Transpose|Flatten|Squeeze|Unsqueeze|Concat|Split|Slice|Gather|GatherND|GatherElements|Expand|Tile|Shape|Size|Identity|Cast|CastLike|Constant|ConstantOfShape|Scatter.*|Range|Where)$/],
  ["quantize", /^(Quantize|Dequantize|DynamicQuantize)/],
  ["control", /^(If|Loop|Scan|Sequence.*|Optional.*)$/],
];

function family(op) {
  const found = FAMILIES.find(([, pattern]) => pattern.test(op));
  return found ? found[0] : "other";
}

const ruler = document.createElement("canvas").getContext("2d");

function textWidth(text, bold) {
  ruler.font = `${bold ? "600 " : ""}13px system-ui, sans-serif`;
  return ruler.measureText(text).width;
}

function shorten(text, most = 28) {
  return text.length <= most ? text : `${text.slice(0, most - 9)}\u2026${text.slice(-8)}`;
}

/** The lines of a box: the first bold. */
function boxLines(graph, box) {
  if (box.kind === "scope") {
    return [shorten(box.name), `${countText(box.nodes)} ${box.nodes === 1 ? "node" : "nodes"}`];
  }
  if (box.kind !== "node") {
    const value = graph.values[box.value];
    return [shorten(value.name), shorten(typeText(value), 34)];
  }
  const { node } = box;
  const lines = [shorten(node.op)];
  const name = shortName(node);
  if (name.toLowerCase() !== node.op.toLowerCase()) lines.push(shorten(name));
  const stored = node.inputs.filter((at) => at >= 0 && ["weight", "state"].includes(graph.values[at].kind));
  const shapes = stored.slice(0, 2).map((at) => shapeText(graph.values[at].shape));
  if (shapes.length) lines.push(shorten(shapes.join(", ") + (stored.length > 2 ? ", \u2026" : ""), 34));
  return lines;
}

/** {boxes: Map id -> {x, y, width, height, lines}, frames: Map, edges: [{points, ...}], width, height} */
function layOut(folding) {
  const { graph } = folding;
  const plan = new dagre.graphlib.Graph({ compound: true, multigraph: false });
  plan.setGraph({ rankdir: "TB", nodesep: 26, ranksep: 38, edgesep: 14, marginx: 24, marginy: 24 });
  plan.setDefaultEdgeLabel(() => ({}));
  const seen = folding.seen();
  const edges = folding.edges();
  const boxes = new Map();
  const ends = [...folding.boxes.values()].filter((box) => box.kind === "input" || box.kind === "result").map((box) => box.id);
  for (const id of [...seen, ...ends]) {
    const box = folding.boxes.get(id);
    const lines = boxLines(graph, box);
    const width = Math.max(76, 30 + Math.max(...lines.map((line, at) => textWidth(line, at === 0))));
    const place = { width: Math.ceil(width), height: 16 + 17 * lines.length, lines };
    boxes.set(id, place);
    plan.setNode(id, place);
  }
  const frames = new Map();
  // dagre refuses an empty cluster, and takes one without an own node as a node.
  for (const id of folding.frames()) {
    frames.set(id, {});
    plan.setNode(id, frames.get(id));
  }
  for (const id of [...seen, ...frames.keys()]) {
    const { parent } = folding.boxes.get(id);
    if (parent && frames.has(parent)) plan.setParent(id, parent);
  }
  for (const edge of edges) if (boxes.has(edge.from) && boxes.has(edge.to)) plan.setEdge(edge.from, edge.to, edge);
  dagre.layout(plan);
  const size = plan.graph();
  for (const [id, place] of [...boxes, ...frames]) Object.assign(place, plan.node(id));
  return { boxes, frames, edges: edges.filter((edge) => edge.points), width: size.width || 100, height: size.height || 100 };
}

/** A soft line through points. */
function curve(points) {
  const show = ({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`;
  if (points.length < 3) return `M${points.map(show).join("L")}`;
  let path = `M${show(points[0])}`;
  for (let at = 1; at < points.length - 1; at += 1) {
    const next = points[at + 1];
    const end = at === points.length - 2 ? next : { x: (points[at].x + next.x) / 2, y: (points[at].y + next.y) / 2 };
    path += `Q${show(points[at])} ${show(end)}`;
  }
  return path;
}
