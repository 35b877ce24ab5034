/* A graph folded by scope: which scopes are open, which boxes are seen, and what runs between them. */

const MOST_CHILDREN = 80;
const PART = 40;
const MOST_SEEN = 400;
const AT_FIRST = 60;
const DRAWN = new Set(["input", "output", "inner"]);

/** Boxes have an id: "n3" is a node, "s2" a scope, "i0" an input of the graph, "o0" an output. */
class Folding {
  constructor(graph) {
    this.graph = graph;
    this.boxes = new Map();
    this.open = new Set();
    this.consumers = graph.values.map(() => []);
    graph.nodes.forEach((node, place) => {
      for (const value of [...node.inputs, ...(node.feeds ?? [])]) if (value >= 0) this.consumers[value].push(place);
    });
    this.root = this.addScope("s0", "", null, 0);
    graph.scopes.forEach((scope, place) => {
      if (place) this.addScope(`s${place}`, scope.name, `s${scope.parent}`, place);
    });
    const attached = new Set([this.root.id]);
    graph.nodes.forEach((node, place) => {
      // Constants are shown with what reads them, like weights.
      if (node.op === "Constant" && !node.inputs.length) return;
      // A scope stands among its parent's children where its first node does.
      const chain = [];
      for (let scope = `s${node.scope}`; !attached.has(scope); scope = this.boxes.get(scope).parent) chain.push(scope);
      for (const scope of chain.reverse()) {
        attached.add(scope);
        this.boxes.get(this.boxes.get(scope).parent).children.push(scope);
      }
      const box = { id: `n${place}`, kind: "node", node, place, parent: `s${node.scope}` };
      this.boxes.set(box.id, box);
      this.boxes.get(box.parent).children.push(box.id);
    });
    this.parts = 0;
    this.count(this.root);
    for (const box of [...this.boxes.values()]) if (box.kind === "scope") this.divide(box);
    this.count(this.root);
    graph.inputs.forEach((value, at) => {
      if (graph.values[value].kind === "input") this.boxes.set(`i${at}`, { id: `i${at}`, kind: "input", value });
    });
    graph.outputs.forEach((value, at) => this.boxes.set(`o${at}`, { id: `o${at}`, kind: "result", value }));
    this.begin();
  }

  addScope(id, name, parent, place) {
    const box = { id, kind: "scope", name, parent, place, children: [], nodes: 0 };
    this.boxes.set(id, box);
    return box;
  }

  /** Scopes with too many children get parts, so that no picture is too large. */
  divide(scope) {
    while (scope.children.length > MOST_CHILDREN) {
      const many = Math.ceil(scope.children.length / PART);
      const length = Math.ceil(scope.children.length / many);
      const parts = [];
      let first = 1;
      for (let at = 0; at < scope.children.length; at += length) {
        const children = scope.children.slice(at, at + length);
        const last = first - 1 + children.reduce((sum, child) => sum + (this.boxes.get(child).nodes ?? 1), 0);
        const part = this.addScope(`p${this.parts++}`, `nodes ${first} \u2013 ${last}`, scope.id, -1);
        part.nodes = last - first + 1;
        first = last + 1;
        part.children = children;
        for (const child of children) this.boxes.get(child).parent = part.id;
        parts.push(part.id);
      }
      scope.children = parts;
    }
  }

  count(scope) {
    // With a stack of its own: scopes may be within each other more deeply than calls may.
    const order = [scope];
    for (let at = 0; at < order.length; at += 1)
      for (const child of order[at].children) if (this.boxes.get(child).kind === "scope") order.push(this.boxes.get(child));
    for (const each of order.reverse())
      each.nodes = each.children.reduce((sum, child) => sum + (this.boxes.get(child).nodes ?? 1), 0);
  }

  /** The scopes that are open at first: those around others, as long as the picture stays small. */
  begin() {
    this.open = new Set([this.root.id]);
    let seen = this.root.children.length;
    const waiting = [...this.root.children];
    while (waiting.length) {
      const box = this.boxes.get(waiting.shift());
      if (box.kind !== "scope" || seen + box.children.length - 1 > AT_FIRST) continue;
      this.open.add(box.id);
      seen += box.children.length - 1;
      waiting.push(...box.children);
    }
  }

  foldAll() {
    this.open = new Set([this.root.id]);
  }

  /** Open everything that fits; returns whether all of it does. */
  unfoldAll() {
    const scopes = [...this.boxes.values()].filter((box) => box.kind === "scope");
    if (this.graph.nodes.length <= MOST_SEEN) {
      this.open = new Set(scopes.map((box) => box.id));
      return true;
    }
    this.begin();
    return false;
  }

  /** Open or close a scope; what has one scope alone inside opens with it. Returns whether there was room. */
  toggle(id) {
    if (this.open.has(id)) {
      this.open.delete(id);
      return true;
    }
    const before = new Set(this.open);
    let box = this.boxes.get(id);
    this.open.add(id);
    while (box.children.length === 1 && this.boxes.get(box.children[0]).kind === "scope") {
      box = this.boxes.get(box.children[0]);
      this.open.add(box.id);
    }
    if (this.seen().length <= MOST_SEEN) return true;
    this.open = before;
    return false;
  }

  /** Open all scopes around a box, and close others if there is no room. */
  reveal(id) {
    const around = [];
    for (let scope = this.boxes.get(id)?.parent; scope; scope = this.boxes.get(scope).parent) around.push(scope);
    for (const scope of around) this.open.add(scope);
    if (this.seen().length > MOST_SEEN) this.open = new Set(around);
  }

  /** The boxes that are seen, without the open scopes around them. */
  seen() {
    const found = [];
    const waiting = [this.root.id];
    while (waiting.length) {
      const box = this.boxes.get(waiting.pop());
      if (box.kind === "scope" && this.open.has(box.id)) waiting.push(...[...box.children].reverse());
      else found.push(box.id);
    }
    return found;
  }

  /** The open scopes that are seen, from the outside in, without the whole graph. */
  frames() {
    const found = [];
    const waiting = [this.root.id];
    while (waiting.length) {
      const box = this.boxes.get(waiting.shift());
      if (box.kind !== "scope" || !this.open.has(box.id)) continue;
      if (box !== this.root) found.push(box.id);
      waiting.push(...box.children);
    }
    return found;
  }

  /** The seen box that stands for a node. */
  standIn(place) {
    let stands = `n${place}`;
    for (let scope = this.boxes.get(stands).parent; scope; scope = this.boxes.get(scope).parent)
      if (!this.open.has(scope)) stands = scope;
    return stands;
  }

  /** [{from, to, values}] between seen boxes; several values between the same two are one. */
  edges() {
    const found = new Map();
    const stand = this.graph.nodes.map((_, place) => (this.boxes.has(`n${place}`) ? this.standIn(place) : undefined));
    const add = (from, to, value) => {
      if (from === to) return;
      const key = `${from} ${to}`;
      if (!found.has(key)) found.set(key, { from, to, values: [] });
      const { values } = found.get(key);
      if (values[values.length - 1] !== value) values.push(value);
    };
    const inputs = new Map();
    for (const box of this.boxes.values()) if (box.kind === "input") inputs.set(box.value, box.id);
    this.graph.values.forEach((value, at) => {
      const from = value.producer >= 0 ? stand[value.producer] : inputs.get(at);
      if (from === undefined || !DRAWN.has(value.kind)) return;
      for (const reader of this.consumers[at]) add(from, stand[reader], at);
    });
    for (const box of this.boxes.values()) {
      if (box.kind !== "result") continue;
      const value = this.graph.values[box.value];
      const from = value.producer >= 0 ? stand[value.producer] : inputs.get(box.value);
      if (from !== undefined) add(from, box.id, box.value);
    }
    return [...found.values()];
  }

  /** "block1/conv" for a box. */
  path(id) {
    const names = [];
    for (let box = this.boxes.get(id); box && box !== this.root; box = this.boxes.get(box.parent)) names.unshift(boxName(this.graph, box));
    return names.join(" / ");
  }
}

/** What a box is called in the picture. */
function boxName(graph, box) {
  if (box.kind === "scope") return box.name;
  if (box.kind === "node") return shortName(box.node);
  return graph.values[box.value].name;
}

/** The last part of a node's name. */
function shortName(node) {
  const parts = node.name.split("/");
  return parts[parts.length - 1] || node.op;
}
