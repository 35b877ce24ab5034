/**
 * Labels that are classes. Graphs pick elements by them, so one that is no class would end training at some step, with
 * words of ONNX Runtime's that name no example.
 */

import { numberAt } from "../arrays.js";
import type { Bundle } from "../bundle/reader.js";
import type { Port } from "../bundle/roles.js";
import { RuntimeInputError } from "../errors.js";
import { findProgram } from "./driver.js";
import type { Fields } from "./fields.js";

/** Raises RuntimeInputError for a label that is no class of what `predict` answers, and not `ignored`. */
export function checkLabels(where: string, bundle: Bundle, fields: Fields, ignored: number | undefined): void {
  if (ignored !== undefined && !Number.isInteger(ignored)) {
    throw new RuntimeInputError(`${where}: ignoreLabel must be a whole number, got ${ignored}`);
  }
  const predict = findProgram(bundle, "predict");
  if (predict === null) return;
  const { outputs } = bundle.program(predict);
  const ports = Object.values(bundle.manifest.programs).flatMap((program) => program.inputs);
  for (const [name, array] of fields.arrays) {
    const port = ports.find((each) => each.role === "label" && each.name === name);
    const classes = port === undefined ? null : classesOf(port, outputs);
    if (classes === null) continue;
    const width = array.data.length / Math.max(1, fields.count);
    for (let index = 0; index < array.data.length; index++) {
      const label = numberAt(array, index);
      if (label === ignored || (label >= 0 && label < classes)) continue;
      throw new RuntimeInputError(
        `${where}: '${name}' of example ${Math.floor(index / width)} is ${label}, which is no class: they are ` +
          `0 to ${classes - 1}. Correct it, or give ignoreLabel: ${label} if the bundle ignores that label`,
      );
    }
  }
}

/** How many classes the label names one of; null where it is none, or the bundle does not say. */
function classesOf(label: Port, outputs: readonly Port[]): number | null {
  const [output, more] = outputs;
  if (output === undefined || more !== undefined || !/^u?int(8|16|32|64)$/.test(label.dtype)) return null;
  if (!/^float/.test(output.dtype) || output.shape.length !== label.shape.length + 1) return null;
  const rest = label.shape.slice(1).join();
  const axis = output.shape.slice(2).join() === rest ? 1 : output.shape.length - 1;
  if (output.shape.slice(1).filter((_, index) => index + 1 !== axis).join() !== rest) return null;
  const classes = output.shape[axis];
  return typeof classes === "number" && classes > 1 ? classes : null;
}
