/**
 * Walk a graph before anything runs it: every node, subgraph, function body and tensor.
 *
 * What passes reads no file but the bundle's weights and uses nothing but standard operators and functions of its own.
 * The same as archipel/bundle/graphs/inspection.py, and tested on the same graphs.
 */

import { UnsafeGraphError } from "../../errors.js";
import * as schema from "./onnx_schema.js";
import { IR_VERSION, OPERATORS, OPSET } from "./operators.js";
import { checkTensor, type WeightsFile } from "./tensors.js";
import { type Message, Reader, type Span, WireError } from "./wire.js";

export const MAX_GRAPH_BYTES = 64 << 20;
/** Nodes of a graph once every call of a function is replaced by its body: ONNX Runtime does that. */
export const MAX_NODES = 500_000;
/** Subgraphs within subgraphs, types within types. */
export const MAX_DEPTH = 16;
export const MAX_CALL_DEPTH = 32;
export const METADATA_PREFIX = "archipel.";
const RESERVED_DOMAINS = ["ai.onnx", "com.microsoft", "com.ms", "org.pytorch"];
const NONE: Span = [0, 0];
/** The main graph, among the names of functions: those have a domain. */
const MAIN = "";

/** Where the walk is: for messages, in which function (MAIN for none), how many subgraphs deep. */
interface Scope {
  readonly where: string;
  readonly inside: string;
  readonly depth: number;
}

/** How often a function calls another, and within how many subgraphs at most. */
interface Calls {
  readonly times: number;
  readonly depth: number;
}

/** A function with all that it calls: the nodes, how many calls deep it goes, and how many subgraphs deep. */
interface Expanded {
  readonly nodes: number;
  readonly below: number;
  readonly depth: number;
}

/** Check the serialized ModelProto `data` of `program`. Raises UnsafeGraphError, which says where and what. */
export function inspectGraph(program: string, data: Uint8Array, weights: WeightsFile): void {
  const where = `program '${program}'`;
  if (data.length > MAX_GRAPH_BYTES) {
    throw new UnsafeGraphError(`${where}: its graph has ${data.length} bytes, the limit is ${MAX_GRAPH_BYTES} (64 MiB)`);
  }
  try {
    new Walk(data, where, weights).model();
  } catch (error) {
    if (!(error instanceof WireError)) throw error;
    throw new UnsafeGraphError(
      `${where}: its graph is not what the converter writes: ${error.message}; convert it again, or do not use this bundle`,
    );
  }
}

class Walk {
  private readonly reader: Reader;
  private readonly whole: Span;
  private readonly functions = new Map<string, Message>();
  private readonly domains = new Set<string>();
  /** Per function, and MAIN: its own nodes, how many subgraphs deep they go, and which functions it calls. */
  private readonly nodes = new Map<string, number>();
  private readonly depths = new Map<string, number>();
  private readonly calls = new Map<string, Map<string, Calls>>();

  constructor(
    data: Uint8Array,
    private readonly where: string,
    private readonly weights: WeightsFile,
  ) {
    this.reader = new Reader(data);
    this.whole = [0, data.length];
  }

  model(): void {
    const { reader, where } = this;
    const model = reader.read(schema.MODEL, this.whole);
    if (model.number("ir_version") !== IR_VERSION) {
      throw new UnsafeGraphError(
        `${where}: IR version ${model.number("ir_version")}, expected ${IR_VERSION}; convert it again`,
      );
    }
    const graph = model.span("graph");
    if (graph === undefined) throw new UnsafeGraphError(`${where}: its file holds no graph`);
    this.metadata(model, where);
    const bodies = model.spansOf("functions").map((span) => reader.read(schema.FUNCTION, span));
    for (const body of bodies) {
      const name = this.functionName(body);
      if (this.functions.has(name)) throw new UnsafeGraphError(`${where}: function ${shown(name)} is there twice`);
      this.functions.set(name, body);
    }
    if (!this.imports(model, where)) {
      throw new UnsafeGraphError(`${where}: no standard opset is imported, expected ${OPSET}; convert it again`);
    }
    this.graph(graph, { where, inside: MAIN, depth: 0 });
    for (const [name, body] of this.functions) this.body(name, body);
    const known = new Map<string, Expanded>();
    for (const name of [MAIN, ...this.functions.keys()]) this.expanded(name, known, []);
  }

  private functionName(body: Message): string {
    const domain = this.text(body, "domain");
    const name = this.text(body, "name");
    const reserved = domain === "" || RESERVED_DOMAINS.some((each) => domain === each || domain.startsWith(`${each}.`));
    if (reserved || name === "") {
      throw new UnsafeGraphError(
        `${this.where}: function '${name.slice(0, 64)}' of domain '${domain.slice(0, 64)}': a function has a name, ` +
          "and a domain that is not ONNX's or ONNX Runtime's own",
      );
    }
    this.domains.add(domain);
    return key(domain, name, this.text(body, "overload"));
  }

  private body(name: string, body: Message): void {
    const where = `${this.where}: function ${shown(name)}`;
    this.imports(body, where);
    this.metadata(body, where);
    const scope: Scope = { where, inside: name, depth: 0 };
    for (const span of body.spansOf("attribute_proto")) this.attribute(span, scope, where);
    for (const span of body.spansOf("value_info")) this.valueInfo(span, where);
    this.begin(scope);
    for (const span of body.spansOf("node")) this.node(span, scope);
  }

  private begin({ inside, depth }: Scope): void {
    this.depths.set(inside, Math.max(depth, this.depths.get(inside) ?? 0));
    if (this.nodes.has(inside)) return;
    this.nodes.set(inside, 0);
    this.calls.set(inside, new Map());
  }

  /** A function with all that it calls. Each function is looked at once. */
  private expanded(name: string, known: Map<string, Expanded>, path: readonly string[]): Expanded {
    if (path.includes(name)) {
      throw new UnsafeGraphError(`${this.where}: function ${shown(name)} calls itself, in one step or in several`);
    }
    const before = known.get(name);
    // ONNX Runtime's stack overflows a few thousand calls down.
    if (path.length + (before?.below ?? 0) > MAX_CALL_DEPTH) {
      throw new UnsafeGraphError(`${this.where}: functions call each other more than ${MAX_CALL_DEPTH} deep`);
    }
    if (before !== undefined) return before;
    let nodes = this.nodes.get(name) ?? 0;
    let below = 0;
    let depth = this.depths.get(name) ?? 0;
    for (const [to, call] of this.calls.get(name) ?? []) {
      const called = this.expanded(to, known, [...path, name]);
      nodes += call.times * called.nodes;
      below = Math.max(below, 1 + called.below);
      depth = Math.max(depth, call.depth + called.depth);
    }
    if (nodes > MAX_NODES) {
      throw new UnsafeGraphError(`${this.where}: more than ${MAX_NODES} nodes, calls of functions included`);
    }
    // ONNX Runtime takes minutes and gigabytes for a few hundred subgraphs within each other.
    if (depth > MAX_DEPTH) {
      throw new UnsafeGraphError(`${this.where}: subgraphs more than ${MAX_DEPTH} deep, those of functions included`);
    }
    const found = { nodes, below, depth };
    known.set(name, found);
    return found;
  }

  /** Whether the standard operators are among the imports. */
  private imports(owner: Message, where: string): boolean {
    const seen = new Set<string>();
    for (const span of owner.spansOf("opset_import")) {
      const entry = this.reader.read(schema.OPSET_IMPORT, span);
      const domain = this.text(entry, "domain");
      if (seen.has(domain)) throw new UnsafeGraphError(`${where}: opset '${domain}' is imported twice`);
      seen.add(domain);
      if (domain === "" && entry.number("version") !== OPSET) {
        throw new UnsafeGraphError(
          `${where}: standard opset ${entry.number("version")}, expected ${OPSET}; convert it again`,
        );
      }
      if (domain !== "" && !this.domains.has(domain)) {
        throw new UnsafeGraphError(
          `${where}: opset of domain '${domain.slice(0, 64)}', of which the graph has no function; expected standard ` +
            "operators and functions of the graph's own",
        );
      }
    }
    return seen.has("");
  }

  private graph(span: Span, scope: Scope): void {
    const { where } = scope;
    if (scope.depth > MAX_DEPTH) throw new UnsafeGraphError(`${where}: subgraphs more than ${MAX_DEPTH} deep`);
    const graph = this.reader.read(schema.GRAPH, span);
    this.metadata(graph, where);
    this.begin(scope);
    for (const tensor of graph.spansOf("initializer")) this.tensor(tensor, where, "initializer");
    for (const part of ["input", "output", "value_info"]) {
      for (const value of graph.spansOf(part)) this.valueInfo(value, where);
    }
    for (const node of graph.spansOf("node")) this.node(node, scope);
  }

  private node(span: Span, scope: Scope): void {
    const node = this.reader.read(schema.NODE, span);
    const opType = this.text(node, "op_type");
    const domain = this.text(node, "domain");
    const where = `${scope.where}: node '${this.text(node, "name").slice(0, 64)}' (${opType.slice(0, 64)})`;
    this.nodes.set(scope.inside, (this.nodes.get(scope.inside) ?? 0) + 1);
    if (domain === "") {
      if (!OPERATORS.has(opType) || node.has("overload")) {
        throw new UnsafeGraphError(
          `${where}: '${opType.slice(0, 64)}' is not a standard operator of opset ${OPSET} that ONNX Runtime's CPU ` +
            "build runs; convert the model again, or do not use this bundle",
        );
      }
    } else {
      const name = key(domain, opType, this.text(node, "overload"));
      if (!this.functions.has(name)) {
        throw new UnsafeGraphError(
          `${where}: operator '${opType.slice(0, 64)}' of domain '${domain.slice(0, 64)}'; expected a standard ` +
            "operator or a function of the graph's own. Do not use this bundle",
        );
      }
      const calls = this.calls.get(scope.inside) as Map<string, Calls>;
      const { times, depth } = calls.get(name) ?? { times: 0, depth: 0 };
      calls.set(name, { times: times + 1, depth: Math.max(depth, scope.depth) });
    }
    this.metadata(node, where);
    const names = node.spansOf("attribute").map((attribute) => this.attribute(attribute, scope, where));
    if (new Set(names).size !== names.length) {
      throw new UnsafeGraphError(`${where}: two attributes have the same name`);
    }
  }

  /** Checks the attribute; its name. */
  private attribute(span: Span, scope: Scope, where: string): string {
    const attribute = this.reader.read(schema.ATTRIBUTE, span);
    const name = this.text(attribute, "name");
    const kind = attribute.number("type");
    const others = ["name", "type", "doc_string", "ref_attr_name"];
    const held = attribute.names.filter((each) => !others.includes(each)).sort();
    const expected = schema.ATTRIBUTE_VALUES.get(kind);
    if (expected === undefined) {
      throw new UnsafeGraphError(`${where}: attribute '${name.slice(0, 64)}' is of type ${kind}, which no bundle has`);
    }
    if (attribute.has("ref_attr_name")) {
      if (scope.inside === MAIN || held.length) {
        throw new UnsafeGraphError(
          `${where}: attribute '${name.slice(0, 64)}' refers to one of a function, outside of one`,
        );
      }
      return name;
    }
    // A list may be empty, and then nothing is there.
    const emptyList = held.length === 0 && expected.endsWith("s") && expected !== "s";
    if (!emptyList && (held.length !== 1 || held[0] !== expected)) {
      throw new UnsafeGraphError(
        `${where}: attribute '${name.slice(0, 64)}' is of type ${kind} (${expected}) and has ` +
          (held.join(", ") || "no value"),
      );
    }
    const single = attribute.span(expected);
    const spans = (): readonly Span[] => (single === undefined ? attribute.spansOf(expected) : [single]);
    if (expected === "t" || expected === "tensors") {
      for (const tensor of spans()) this.tensor(tensor, where, `attribute '${name.slice(0, 64)}'`);
    } else if (expected === "g" || expected === "graphs") {
      for (const graph of spans()) this.graph(graph, { ...scope, where, depth: scope.depth + 1 });
    } else if (expected === "tp" || expected === "type_protos") {
      for (const each of spans()) this.type(each, where, 0);
    }
    return name;
  }

  private tensor(span: Span, where: string, what: string): void {
    const tensor = this.reader.read(schema.TENSOR, span);
    const here = `${where}: ${what} '${this.text(tensor, "name").slice(0, 64)}'`;
    this.metadata(tensor, here);
    checkTensor(this.reader, tensor, here, this.weights);
  }

  private valueInfo(span: Span, where: string): void {
    const value = this.reader.read(schema.VALUE_INFO, span);
    this.metadata(value, where);
    const type = value.span("type");
    if (type !== undefined) this.type(type, where, 0);
  }

  private type(span: Span, where: string, depth: number): void {
    if (depth > MAX_DEPTH) throw new UnsafeGraphError(`${where}: types more than ${MAX_DEPTH} deep`);
    const found = this.reader.read(schema.TYPE, span);
    const kinds = found.names.filter((each) => each !== "denotation").sort();
    if (kinds.length > 1) throw new UnsafeGraphError(`${where}: a type is ${kinds.join(" and ")} at once`);
    const [kind] = kinds;
    if (kind === undefined) return;
    const inner = found.span(kind) ?? NONE;
    if (kind === "tensor_type") {
      const tensor = this.reader.read(schema.TENSOR_TYPE, inner);
      const shape = this.reader.read(schema.SHAPE, tensor.span("shape") ?? NONE);
      for (const dimension of shape.spansOf("dim")) this.reader.read(schema.DIMENSION, dimension);
    } else {
      const element = this.reader.read(schema.ELEMENT_TYPE, inner);
      this.type(element.span("elem_type") ?? NONE, where, depth + 1);
    }
  }

  private metadata(owner: Message, where: string): void {
    for (const span of owner.spansOf("metadata_props")) {
      const name = this.text(this.reader.read(schema.ENTRY, span), "key");
      if (!name.startsWith(METADATA_PREFIX)) {
        throw new UnsafeGraphError(
          `${where}: metadata '${name.slice(0, 64)}', expected keys that begin with '${METADATA_PREFIX}': runtimes ` +
            "may act on others",
        );
      }
    }
  }

  private text(owner: Message, field: string): string {
    return this.reader.text(owner.span(field));
  }
}

/** A function's name in one string: a zero byte is in none of the three. */
function key(domain: string, name: string, overload: string): string {
  return `${domain}\0${name}\0${overload}`;
}

function shown(name: string): string {
  const [domain = "", own = ""] = name.split("\0");
  return `'${domain.slice(0, 64)}.${own.slice(0, 64)}'`;
}
