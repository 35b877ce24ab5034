/** The options of each call: a name that is none of them is refused, with the one that was probably meant. */

import type { EvaluateOptions, FitOptions, LoadOptions, RoundOptions } from "./api.js";
import { RuntimeInputError } from "./errors.js";

type Names<T> = Readonly<Record<keyof T, true>>;

const LOAD: Names<LoadOptions> = {
  trustedKeys: true,
  allowDevelopment: true,
  memoryLimit: true,
  delegate: true,
  threads: true,
  worker: true,
  slot: true,
  carry: true,
  signal: true,
  onProgress: true,
};
const FIT: Names<FitOptions> = {
  x: true,
  y: true,
  epochs: true,
  batchSize: true,
  shuffle: true,
  seed: true,
  hyperparameters: true,
  validation: true,
  ignoreLabel: true,
  onStep: true,
  onEpoch: true,
  checkpoint: true,
  checkpointEvery: true,
  featureCache: true,
  moves: true,
  program: true,
  broadcast: true,
  signal: true,
};
const EVALUATE: Names<EvaluateOptions> = { x: true, y: true, batchSize: true, ignoreLabel: true };
const ROUND: Names<RoundOptions> = {
  x: true,
  y: true,
  seed: true,
  broadcast: true,
  hyperparameters: true,
  parameters: true,
  ignoreLabel: true,
  onStep: true,
  signal: true,
};

const OPTIONS = { load: LOAD, fit: FIT, evaluate: EVALUATE, localRound: ROUND };
const CALLBACKS = ["onStep", "onEpoch", "onProgress"];

/** Raises RuntimeInputError for a name that is no option of `call`, or a callback that is no function. */
export function checkOptions(call: keyof typeof OPTIONS, given: unknown): void {
  if (typeof given !== "object" || given === null || Array.isArray(given)) {
    throw new RuntimeInputError(`${call}: expected an object of options, got ${given === null ? "null" : typeof given}`);
  }
  const known = Object.keys(OPTIONS[call]);
  for (const [name, value] of Object.entries(given)) {
    if (!known.includes(name)) {
      const meant = known.find((each) => distance(each.toLowerCase(), name.toLowerCase()) <= 2);
      const hint = meant === undefined ? `the options are ${known.join(", ")}` : `did you mean '${meant}'?`;
      throw new RuntimeInputError(`${call}: there is no option '${name.slice(0, 64)}'; ${hint}`);
    }
    if (CALLBACKS.includes(name) && value !== undefined && typeof value !== "function") {
      throw new RuntimeInputError(`${call}: ${name} must be a function, got ${typeof value}`);
    }
    if (name === "signal" && value !== undefined && !(value instanceof AbortSignal)) {
      throw new RuntimeInputError(`${call}: signal must be an AbortSignal`);
    }
  }
}

/** How many letters have to be put in, taken out or replaced (Levenshtein). */
function distance(first: string, second: string): number {
  if (Math.abs(first.length - second.length) > 2) return 3;
  let row = Array.from({ length: second.length + 1 }, (_, index) => index);
  for (const [index, letter] of [...first].entries()) {
    const next = [index + 1];
    for (let at = 1; at <= second.length; at++) {
      const replaced = (row[at - 1] ?? 0) + (second[at - 1] === letter ? 0 : 1);
      next.push(Math.min(replaced, (row[at] ?? 0) + 1, (next[at - 1] ?? 0) + 1));
    }
    row = next;
  }
  return row[second.length] ?? 0;
}
