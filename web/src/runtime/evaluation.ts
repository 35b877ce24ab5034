/** Metrics over a whole data set: `predict` answers batch by batch, `evaluate` compares with the labels. */

import { fill, type NdArray, numberAt, zeros } from "../arrays.js";
import type { Bundle } from "../bundle/reader.js";
import type { Port } from "../bundle/roles.js";
import { RuntimeInputError } from "../errors.js";
import { needProgram } from "./driver.js";
import { exactSum } from "./exact_sum.js";
import { type Arrays, collect, FIELD_ROLES, fixedRows } from "./fields.js";
import type { Predictor } from "./predictor.js";
import { metricsOf, MetricTable } from "./results.js";
import { type Sessions, toArray } from "./sessions.js";
import { breathe } from "./turn.js";
import { fixedShape, type Values } from "./values.js";

/** The fields that an evaluation reads: examples for `predict`, labels and weights for `evaluate`. */
export function evaluationFields(bundle: Bundle): Port[] {
  const measured = bundle.program(needProgram(bundle, "evaluate", "evaluate"));
  const predicted = bundle.program(needProgram(bundle, "predict", "evaluate"));
  return [
    ...predicted.inputs.filter((port) => port.role === "example"),
    ...measured.inputs.filter((port) => FIELD_ROLES.has(port.role)),
  ];
}

/**
 * Predict all examples and measure the answers with the `evaluate` program `name`; each metric is reduced as its role
 * declares.
 *
 * Graphs made for batches of one size get those, the last one filled up with examples of weight 0; without an
 * example_weight input the number of examples must be a multiple of it. Raises RuntimeInputError.
 */
export async function evaluate(
  sessions: Sessions,
  name: string,
  predictor: Predictor,
  values: Values,
  x: NdArray | Arrays,
  y: NdArray | null | undefined,
  batchSize: number,
): Promise<Record<string, number>> {
  if (!Number.isInteger(batchSize) || batchSize < 1) {
    throw new RuntimeInputError(`evaluate: the batch size must be at least 1, got ${batchSize}`);
  }
  const program = sessions.bundle.program(name);
  const session = await sessions.get(name);
  const ports = evaluationFields(sessions.bundle);
  const predictions = program.inputs.filter((port) => port.role === "prediction");
  const fields = collect("evaluate", ports, x, y);
  const constant = Object.fromEntries(
    program.inputs
      .filter((port) => !FIELD_ROLES.has(port.role) && port.role !== "prediction")
      .map((port) => [port.name, session.tensor(values.read(port))]),
  );
  const rows = fixedRows(ports);
  if (rows !== null && !ports.some((port) => port.role === "example_weight") && fields.count % rows) {
    throw new RuntimeInputError(
      `evaluate: ${fields.count} examples, but the graph is made for batches of ${rows}; give a multiple of that`,
    );
  }
  const metrics = metricsOf(program.outputs);
  const table = new MetricTable();
  for (let first = 0; first < fields.count; first += rows ?? batchSize) {
    const used = Math.min(rows ?? batchSize, fields.count - first);
    const feed = { ...constant };
    const examples: Record<string, NdArray> = {};
    let total = used;
    for (const port of ports) {
      const source = fields.arrays.get(port.name);
      const rest = source === undefined ? fixedShape(port, 1) : source.dims.slice(1);
      const width = rest.reduce((size, dim) => size * dim, 1);
      const array = zeros(port.dtype, [rows ?? used, ...rest]);
      if (source === undefined) fill(array, 1, 0, used * width);
      else array.data.set(source.data.subarray(first * width, (first + used) * width) as never);
      if (port.role === "example_weight") {
        total = exactSum(Array.from({ length: used * width }, (_, index) => numberAt(array, index)));
      } else {
        // Any example does: its weight is 0.
        for (let at = used * width; at < array.data.length; at += width) array.data.copyWithin(at, 0, width);
      }
      if (port.role === "example") examples[port.name] = array;
      else feed[port.name] = session.tensor(array);
    }
    const answers = await predictor.many(examples);
    for (const port of predictions) feed[port.name] = session.tensor(answers[port.output] as NdArray);
    const results = await session.run(
      feed,
      metrics.map((port) => port.name),
    );
    for (const port of metrics) table.add(port, numberAt(await toArray(results[port.name] as never), 0), total);
    await breathe();
  }
  return table.reduced();
}
