/**
 * How far one step of the server can move all parameters, as an L2 norm: what each strategy computes from the signed
 * manifest, the hyperparameters of its server half and the number of devices (archipel/strategies, `step_bound`, where
 * the reasons are).
 */

import type { Manifest } from "../../bundle/manifest.js";
import type { Update } from "../../bundle/roles.js";
import { PolicyError } from "../errors.js";
import { entries } from "../updates/bounds.js";
import { finishProgram } from "../updates/uploads.js";
import { groupsOf, meanBound, meanNorm } from "./sums.js";

type Given = Readonly<Record<string, number>>;
interface Sum {
  readonly manifest: Manifest;
  readonly updates: readonly Update[];
  readonly given: Given;
  readonly devices: number;
}
type Bound = (sum: Sum) => number;

/** FedDyn and FedAsync: what the server remembers is at most so many times as long as an update. */
const MEMORY = 10;
/** Of the adaptive strategies: the bounds of tau, and of beta1 and beta2. */
const TAU = [1e-8, 1] as const;
const LARGEST_BETA = 0.9999;

const averaging: Bound = (sum) => rateOf(sum) * deltasOf(sum);

const fednova: Bound = (sum) => rateOf(sum) * meanNorm(sum.updates, "value", sum.devices) * deltasOf(sum);

const fedavgm: Bound = (sum) => (rateOf(sum) * deltasOf(sum)) / (1 - valueOf(sum, "beta", 0.9, 0, 0.99));

const feddyn: Bound = (sum) => rateOf(sum) * (1 + MEMORY) * deltasOf(sum);

const fedasync: Bound = (sum) => {
  for (const [name, fallback] of [["hinge_slope", 0], ["hinge_delay", 4]] as const) {
    valueOf(sum, name, fallback, 0, 1e6);
  }
  return rateOf(sum, 0.6) * (1 + MEMORY) * deltasOf(sum);
};

const fedexp: Bound = (sum) => {
  const mean = deltasOf(sum);
  const { updates, devices } = sum;
  const squares = groupsOf(updates, "value").reduce((all, group) => all + meanBound(updates, group, devices), 0);
  const epsilon = valueOf(sum, "epsilon", 1e-3, 1e-6, 1e3);
  const worst = Math.min(mean, Math.sqrt(epsilon));
  return rateOf(sum) * Math.max(mean, (squares * worst) / (2 * (worst ** 2 + epsilon)));
};

/** Of several models, or rows, each with the weight of its own devices in the entry `tensor`. */
function slices(tensor: string): Bound {
  return (sum) => {
    const port = sum.updates.find((each) => each.tensor === tensor);
    if (port === undefined) throw new PolicyError(`strategy ${sum.manifest.strategy}: its updates have no ${tensor}`);
    return rateOf(sum) * Math.sqrt(Math.min(entries(port), sum.devices)) * deltasOf(sum);
  };
}

/** `ratio` gives how many times sqrt(v) m can be; `grows`: v never falls below tau^2. */
function adaptive(
  ratio: (beta1: number, beta2: number) => number,
  { beta1, beta2, grows = false }: { beta1: number; beta2?: number; grows?: boolean },
): Bound {
  return (sum) => {
    const rate = rateOf(sum, 0.01);
    const tau = valueOf(sum, "tau", 1e-3, ...TAU);
    const one = valueOf(sum, "beta1", beta1, 0, LARGEST_BETA);
    const two = beta2 === undefined ? 0 : valueOf(sum, "beta2", beta2, 0, LARGEST_BETA);
    const norm = deltasOf(sum);
    const each = norm / Math.sqrt(changedElements(sum));
    return (rate * norm) / (Math.sqrt((each / ratio(one, two)) ** 2 + (grows ? tau ** 2 : 0)) + tau);
  };
}

const fedadam = adaptive(
  (one, two) => {
    if (one === 0) return 1 / Math.sqrt(1 - two);
    if (one ** 2 >= two) return Number.POSITIVE_INFINITY;
    return (1 - one) / Math.sqrt((1 - two) * (1 - one ** 2 / two));
  },
  { beta1: 0.9, beta2: 0.99 },
);

const fedyogi = adaptive(
  (one, two) => {
    if (Math.sqrt(two) <= one) return Number.POSITIVE_INFINITY;
    return Math.max((1 - one) / Math.sqrt((1 - two) * (1 - one ** 2)), (1 - one) / (Math.sqrt(two) - one));
  },
  { beta1: 0.9, beta2: 0.99 },
);

const fedadagrad = adaptive((one) => Math.sqrt((1 - one) / (1 + one)), { beta1: 0, grows: true });

/** The one table; to add a strategy, add it here and to scripts/protocol_vectors/steps.py. */
const BOUNDS: ReadonlyMap<string, Bound> = new Map([
  ...[
    "fedavg", "fedprox", "scaffold", "fedrep", "fedbn", "ditto", "lora", "dpsgd", "fedper", "fedsgd", "moon",
    "perfedavg", "pfedme", "qfedavg", "reptile",
  ].map((name) => [name, averaging] as const),
  ["fednova", fednova],
  ["fedavgm", fedavgm],
  ["fedadam", fedadam],
  ["fedyogi", fedyogi],
  ["fedadagrad", fedadagrad],
  ["fedexp", fedexp],
  ["fedasync", fedasync],
  ["feddyn", feddyn],
  ["ifca", slices("ifca/weights")],
  ["feddistill", slices("feddistill/weights")],
]);

/**
 * The largest L2 norm by which one step of the bundle's strategy can change all parameters together, for the
 * hyperparameters of its server half and so many devices. Raises PolicyError for hyperparameters beyond the policy or
 * the strategy's own bounds, and for a strategy of which this device knows none.
 */
export function stepBound(manifest: Manifest, given: Given, devices: number): number {
  const bound = BOUNDS.get(manifest.strategy);
  if (bound === undefined) {
    throw new PolicyError(`strategy ${manifest.strategy}: this device does not know how far its steps go; update it`);
  }
  const { outputs } = finishProgram(manifest, "");
  const updates = outputs.filter((port): port is Update => port.role === "update");
  return bound({ manifest, updates, given, devices });
}

function deltasOf({ updates, devices }: Sum): number {
  return meanNorm(updates, "delta", devices);
}

/** server_lr. Raises PolicyError beyond the policy. */
function rateOf({ manifest, given }: Sum, fallback = 1): number {
  const most = manifest.privacy.max_server_lr;
  const rate = given.server_lr ?? fallback;
  if (rate >= 0 && rate <= most) return rate;
  throw new PolicyError(`server_lr: ${rate} is outside the bundle's privacy policy, which allows 0 to ${most}`);
}

/** A hyperparameter whose bounds are the strategy's own. Raises PolicyError beyond them. */
function valueOf({ given }: Sum, name: string, fallback: number, low: number, high: number): number {
  const value = given[name] ?? fallback;
  if (value >= low && value <= high) return value;
  throw new PolicyError(`${name}: ${value} is not from ${low} to ${high}, the bounds of this strategy`);
}

/** The number of elements of all parameters that devices change. */
function changedElements({ manifest, updates }: Sum): number {
  const sizes = new Map(manifest.parameters.map(({ name, shape }) => [name, shape.reduce((all, dim) => all * dim, 1)]));
  const names = updates
    .filter((port) => port.kind === "delta")
    .flatMap((port) => port.carries?.parameters ?? [port.tensor]);
  return names.reduce((sum, name) => sum + (sizes.get(name) ?? 0), 0);
}
