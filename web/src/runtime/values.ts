/** What every port of a program reads and writes, by role alone: the memory of one local round. */

import { full, type NdArray, sameDims, sizeOf, zeros } from "../arrays.js";
import type { Bundle } from "../bundle/reader.js";
import type { Broadcast, Hyperparameter, Noise, Personal, Port, State } from "../bundle/roles.js";
import { RuntimeInputError, RuntimeProgramError, TensorLayoutError } from "../errors.js";
import { type DeviceState, joinNames, splitNames } from "./device_state.js";
import { type Arrays, checkArray, describe } from "./fields.js";
import { DiscreteGaussian, type Randomness, systemRandomness } from "./noise.js";

export const MAX_SEED = 2 ** 32 - 1;

export interface RoundInputs {
  readonly broadcast?: Arrays | undefined;
  readonly hyperparameters?: Readonly<Record<string, number>> | undefined;
  readonly seed?: number | undefined;
  readonly examples?: number | undefined;
  readonly randomness?: Randomness | undefined;
}

/**
 * Parameters, personal tensors, state and everything else that ports name, from the start of a round to its end.
 *
 * Nothing here reaches `device` before `keep()`: a round that ends in an error leaves no trace.
 */
export class Values {
  readonly start: ReadonlyMap<string, NdArray>;
  readonly parameters: Map<string, NdArray>;
  readonly broadcast: ReadonlyMap<string, NdArray>;
  readonly seed: number;
  examples: number;
  steps = 0;
  private readonly hyperparameters: ReadonlyMap<string, number>;
  private readonly randomness: Randomness;
  private readonly samplers = new Map<string, DiscreteGaussian>();
  private readonly states = new Map<string, NdArray>();
  private readonly deviceStates = new Set<string>();
  private readonly personal = new Map<string, NdArray>();

  constructor(
    private readonly bundle: Bundle,
    parameters: ReadonlyMap<string, NdArray>,
    private readonly device: DeviceState,
    inputs: RoundInputs = {},
  ) {
    const seed = inputs.seed ?? 0;
    if (!Number.isInteger(seed) || seed < 0 || seed > MAX_SEED) {
      throw new RuntimeInputError(`seed must be a whole number from 0 to ${MAX_SEED}, got ${seed}`);
    }
    this.broadcast = new Map(Object.entries(inputs.broadcast ?? {}));
    this.hyperparameters = checkHyperparameters(bundle, inputs.hyperparameters ?? {});
    this.randomness = inputs.randomness ?? systemRandomness;
    this.start = new Map(parameters);
    this.parameters = new Map(parameters);
    this.seed = seed;
    this.examples = inputs.examples ?? 0;
  }

  /** The port's present value. Raises RuntimeInputError or RuntimeProgramError where there is none. */
  read(port: Port): NdArray {
    switch (port.role) {
      case "parameter":
        return this.parameters.get(port.tensor) ?? none(port);
      case "start":
        return this.start.get(port.tensor) ?? none(port);
      case "personal":
        return this.personalTensor(port);
      case "state":
        return this.state(port);
      case "broadcast":
        return this.broadcastTensor(port);
      case "hyperparameter":
        return full(port.dtype, [], this.hyperparameters.get(port.name) ?? port.default);
      case "count":
        return full(port.dtype, [], port.of === "examples" ? this.examples : this.steps);
      case "step":
        return full(port.dtype, [], this.steps);
      case "seed":
        // Typed arrays keep the low bits, so that a signed input gets the same 32 of them.
        return full(port.dtype, [], this.seed);
      case "noise":
        return this.noise(port);
      default:
        return none(port);
    }
  }

  /** Take a program's output of role parameter, personal or state. The array must not change afterwards. */
  write(port: Port, array: NdArray): void {
    if (port.role === "parameter") {
      this.parameters.set(port.tensor, array);
    } else if (port.role === "personal") {
      this.personal.set(port.tensor, array);
    } else if (port.role === "state" && port.lifetime !== "step") {
      this.states.set(port.tensor, array);
      if (port.lifetime === "device") this.deviceStates.add(port.tensor);
    }
  }

  /** Move the personal tensors and the state that outlives the round to the device's state. */
  keep(): void {
    for (const [name, array] of this.personal) this.device.personal.set(name, array);
    for (const name of this.deviceStates) {
      const array = this.states.get(name);
      if (array !== undefined) this.device.state.set(name, array);
    }
  }

  /** What has moved since the start, by `parameter/NAME`, `personal/NAME` and `state/NAME`. */
  export(): Map<string, NdArray> {
    const moved = new Map([...this.parameters].filter(([name, array]) => array !== this.start.get(name)));
    return joinNames({ parameter: moved, personal: this.personal, state: this.states });
  }

  /** Go on from what `export` gave after `steps` steps. Raises TensorLayoutError for what does not belong here. */
  restore(tensors: ReadonlyMap<string, NdArray>, steps: number): void {
    const groups = splitNames(tensors, ["parameter", "personal", "state"]);
    const ports = new Map<string, Port>();
    for (const program of Object.values(this.bundle.manifest.programs)) {
      for (const port of [...program.inputs, ...program.outputs]) {
        if (port.role === "parameter" || port.role === "personal" || port.role === "state") {
          ports.set(`${port.role}/${port.tensor}`, port);
        }
      }
    }
    for (const [key, array] of joinNames(groups)) {
      const port = ports.get(key);
      if (port === undefined || !fits(port, array)) {
        const expected = port === undefined ? "no such tensor in this bundle" : `expected ${describe(port)}`;
        throw new TensorLayoutError(`${key}: ${array.dtype}[${array.dims}], ${expected}`);
      }
      this.write(port, array);
    }
    this.steps = steps;
  }

  private personalTensor(port: Personal): NdArray {
    let value = this.personal.get(port.tensor);
    if (value === undefined) {
      value = this.device.personal.get(port.tensor);
      if (value === undefined || !fits(port, value)) {
        const init = port.init ?? port.tensor;
        value = shaped(port, this.start.get(init) ?? this.bundle.tensor(init), `initial value ${init}`);
      }
      this.personal.set(port.tensor, value);
    }
    return value;
  }

  private state(port: State): NdArray {
    if (port.lifetime === "step") return this.initialState(port);
    let value = this.states.get(port.tensor);
    if (value === undefined) {
      if (port.lifetime === "device") {
        const kept = this.device.state.get(port.tensor);
        // One of another shape was left by another version of the model: of no use to this one.
        if (kept !== undefined && fits(port, kept)) value = kept;
        this.deviceStates.add(port.tensor);
      }
      value ??= this.initialState(port);
      this.states.set(port.tensor, value);
    }
    return value;
  }

  private initialState(port: State): NdArray {
    if (typeof port.init === "string") {
      return shaped(port, this.bundle.tensor(port.init), `initial value ${port.init}`);
    }
    return full(port.dtype, fixedShape(port), port.init);
  }

  private broadcastTensor(port: Broadcast): NdArray {
    const value = this.broadcast.get(port.tensor);
    if (value === undefined) {
      const there = [...this.broadcast.keys()].sort().join(", ") || "none";
      throw new RuntimeInputError(
        `broadcast '${port.tensor}' (${describe(port)}) is missing; it comes from the server with the round. ` +
          `Given: ${there}`,
      );
    }
    checkArray(`broadcast '${port.tensor}'`, port, value);
    return value;
  }

  private noise(port: Noise): NdArray {
    checkNoise(port);
    let sampler = this.samplers.get(port.name);
    if (sampler === undefined) {
      sampler = new DiscreteGaussian(port.scale, this.randomness);
      this.samplers.set(port.name, sampler);
    }
    const array = zeros(port.dtype, fixedShape(port));
    sampler.sample(sizeOf(array.dims)).forEach((value, index) => {
      const { data } = array;
      if (data instanceof BigInt64Array || data instanceof BigUint64Array) data[index] = value;
      else data[index] = Number(value);
    });
    return array;
  }
}

/** Raises RuntimeInputError for a name that no program has, or a value outside its bounds. */
export function checkHyperparameters(
  bundle: Bundle,
  given: Readonly<Record<string, number>>,
): ReadonlyMap<string, number> {
  const known = new Map<string, Hyperparameter>();
  for (const program of Object.values(bundle.manifest.programs)) {
    for (const port of program.inputs) if (port.role === "hyperparameter") known.set(port.name, port);
  }
  for (const [name, value] of Object.entries(given)) {
    const port = known.get(name);
    if (port === undefined) {
      const there = [...known.keys()].sort().join(", ") || "none";
      throw new RuntimeInputError(`hyperparameter '${name}' is not one of this bundle's: ${there}`);
    }
    if (!(typeof value === "number" && port.minimum <= value && value <= port.maximum)) {
      throw new RuntimeInputError(
        `hyperparameter '${name}' must be from ${port.minimum} to ${port.maximum}, got ${value}`,
      );
    }
  }
  return new Map(Object.entries(given));
}

/** Raises RuntimeProgramError for noise that this runtime does not draw. */
export function checkNoise(port: Noise): void {
  if (port.distribution !== "discrete_gaussian") {
    throw new RuntimeProgramError(
      `noise '${port.name}': this runtime draws only discrete_gaussian, not ${port.distribution}: samples of ` +
        "floating-point Gaussians leak what they should hide (Mironov 2012); convert with discrete_gaussian",
    );
  }
  if (port.dtype === "float16") {
    throw new RuntimeProgramError(`noise '${port.name}': float16 cannot hold exact samples; convert with float32`);
  }
}

/** The port's shape from axis `first` on. Raises RuntimeProgramError if a dimension of it is symbolic. */
export function fixedShape(port: Port, first = 0): number[] {
  return port.shape.slice(first).map((dim) => {
    if (typeof dim === "number") return dim;
    throw new RuntimeProgramError(`${port.role} '${port.name}' must have a fixed shape, has ${describe(port)}`);
  });
}

/** Whether the array has exactly this dtype and shape. */
export function fits(port: { readonly dtype: string; readonly shape: Port["shape"] }, value: NdArray): boolean {
  return value.dtype === port.dtype && sameDims(value.dims, port.shape);
}

function shaped(port: Port, value: NdArray, what: string): NdArray {
  if (fits(port, value)) return value;
  throw new RuntimeProgramError(
    `${port.role} '${port.name}': ${what} is ${value.dtype}[${value.dims}], expected ${describe(port)}`,
  );
}

function none(port: Port): never {
  throw new RuntimeProgramError(`a ${port.role} input ('${port.name}') has no value outside a batch`);
}
