/** Answers of the `predict` program for one set of parameters. */

import type { NdArray } from "../arrays.js";
import type { Program } from "../bundle/roles.js";
import { RuntimeInputError } from "../errors.js";
import { type Arrays, checkArray, describe, isArray } from "./fields.js";
import { type Feed, type Session, toArray } from "./sessions.js";
import type { Values } from "./values.js";

/** A session with everything in place that is not an example. Made anew when parameters change. */
export class Predictor {
  private readonly examples: Program["inputs"];
  private readonly constant: Feed;

  constructor(
    private readonly session: Session,
    private readonly program: Program,
    values: Values,
    /** Whether the session is this predictor's own. */
    private readonly owned: boolean,
  ) {
    this.examples = program.inputs.filter((port) => port.role === "example");
    this.constant = Object.fromEntries(
      program.inputs
        .filter((port) => port.role !== "example")
        .map((port) => [port.name, session.tensor(values.read(port))]),
    );
  }

  /** Array in, array out; record in, record out by output name. Raises RuntimeInputError. */
  async predict(x: NdArray | Arrays): Promise<NdArray | Record<string, NdArray>> {
    if (typeof x !== "object" || x === null) {
      throw new RuntimeInputError(`predict: expected an array or arrays by field name, got ${typeof x}`);
    }
    const [example, more] = this.examples;
    const [output, another] = this.program.outputs;
    if (!isArray(x)) return this.many(x);
    if (example === undefined || output === undefined || more !== undefined || another !== undefined) {
      throw new RuntimeInputError(
        "predict: array in, array out needs one example field and one output; the program has " +
          `${this.examples.map((port) => port.name)} and ${this.program.outputs.map((port) => port.name)}; ` +
          "give and take records",
      );
    }
    return (await this.many({ [example.name]: x }))[output.name] as NdArray;
  }

  /** Arrays by field name in, arrays by output name out. Raises RuntimeInputError. */
  async many(x: Arrays): Promise<Record<string, NdArray>> {
    const sizes = new Map<string, readonly [number, string]>();
    const feed: Feed = { ...this.constant };
    for (const port of this.examples) {
      const array = x[port.name];
      if (array === undefined) {
        throw new RuntimeInputError(
          `predict: field '${port.name}' (${describe(port)}) is missing; given: ${Object.keys(x).sort().join(", ")}`,
        );
      }
      checkArray("predict", port, array, sizes);
      feed[port.name] = this.session.tensor(array);
    }
    const unknown = Object.keys(x).filter((name) => !this.examples.some((port) => port.name === name));
    if (unknown.length) {
      throw new RuntimeInputError(
        `predict: ${unknown.sort().join(", ")} is not a field of the program: ` +
          this.examples.map((port) => port.name).join(", "),
      );
    }
    const names = this.program.outputs.map((port) => port.name);
    const results = await this.session.run(feed, names);
    const outputs: Record<string, NdArray> = {};
    for (const name of names) outputs[name] = await toArray(results[name] as never);
    return outputs;
  }

  async release(): Promise<void> {
    if (this.owned) await this.session.release();
  }
}
