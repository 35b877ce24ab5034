/**
 * The log in which a server accounts for every change of a bundle's weights (archipel/protocol/provenance.py).
 *
 * The server signs each entry, which has the hash of the entry before, so it cannot show one device two histories; and
 * the entry of a secure round is endorsed by at least `threshold` of its devices. How far a step may move the weights
 * follows from the strategy, of which a browser knows nothing: that check is Python's alone.
 */

import type { Manifest } from "../bundle/manifest.js";
import { verifies } from "./crypto.js";
import { signedByDevices } from "./endorsed.js";
import { CertificateError, ProvenanceError } from "./errors.js";
import { verifyChain } from "./identity.js";
import type { Sealed } from "./messages/identity.js";
import { roundPlan } from "./messages/rounds.js";
import { type Endorsement, type WeightsStatement, weightsStatement } from "./messages/weights_log.js";
import { checkPlan } from "./policy.js";
import { bodyDigest, unseal } from "./sealed.js";
import { endorsersNeeded } from "./secagg_plus/terms.js";
import { planLayout } from "./updates/uploads.js";

const FIRST = "0".repeat(64);
/** How many entries a device remembers of one log. */
const MAX_NODES = 1024;
const MAX_ENTRY_BYTES = 1 << 14;

/** One checked entry. */
export interface Node {
  readonly number: number;
  readonly weights: string;
  readonly task: string;
  /** A step from the bundle's weights to these was not a secure round. */
  readonly plain: boolean;
  /** The number of the newest rollback to it, else its own. */
  readonly again: number;
  readonly round: string | null;
}

/** What a device remembers of one log: the hash of entry `number`, and the last nodes, oldest first. */
export interface History {
  readonly number: number;
  readonly head: string;
  readonly nodes: readonly Node[];
}

export const NO_HISTORY: History = { number: 0, head: FIRST, nodes: [] };

/** Reads a log on from where a history ends, and checks each entry. */
export class LogReader {
  private nodes: Node[];

  constructor(
    private readonly population: string,
    private readonly bundle: string,
    /** The digest of the bundle's own weights. */
    private readonly own: string,
    private readonly serverKey: Uint8Array,
    private seen: History,
  ) {
    this.nodes = [...seen.nodes];
  }

  get history(): History {
    return { ...this.seen, nodes: this.nodes.slice(-MAX_NODES) };
  }

  /**
   * Checks and adds the next entry. Raises ProvenanceError unless it follows the last one and its weights follow from
   * logged ones, CertificateError or MessageError where it is not an entry that the server signed.
   */
  async add(sealed: Sealed): Promise<WeightsStatement> {
    const entry = await unseal("weights", sealed, this.serverKey, weightsStatement, MAX_ENTRY_BYTES);
    const number = this.seen.number + 1;
    const where = `weights log of bundle ${this.bundle.slice(0, 16)}..., entry ${number}`;
    if (
      entry.population !== this.population || entry.bundle !== this.bundle || entry.number !== number ||
      entry.previous !== this.seen.head
    ) {
      throw new ProvenanceError(
        `${where}: what the server sent does not follow the entries that this device has seen; it has changed its ` +
          "log, or lost a part of it. The publisher can begin anew with a new bundle",
      );
    }
    if (entry.kind === "start") {
      if (entry.weights !== this.own || entry.task_id === null) {
        throw new ProvenanceError(`${where}: a training starts with the bundle's own weights, this one with others`);
      }
      this.keep(entry, false);
    } else if (entry.kind === "rollback") {
      const node = this.find(entry.weights);
      this.nodes = this.nodes.map((each) => (each === node ? { ...each, again: number } : each));
    } else {
      if (entry.parent === null || entry.round_id === null || entry.task_id === null || entry.plan === null) {
        throw new ProvenanceError(`${where}: a step names its task, round, plan and parent`);
      }
      // A round's endorsement vouches for one step: used twice, it would allow two steps.
      if (this.nodes.some((node) => node.round === entry.round_id)) {
        throw new ProvenanceError(`${where}: round ${entry.round_id} has made a step already`);
      }
      this.keep(entry, this.find(entry.parent, entry.task_id).plain || entry.privacy !== "secure");
    }
    // Last: after an entry that is refused the reader still stands at the entry before.
    this.seen = { ...this.seen, number, head: await bodyDigest(sealed) };
    return entry;
  }

  /** The newest entry with these weights, of `task` or of any. Raises ProvenanceError where there is none. */
  find(weights: string, task = ""): Node {
    const node = this.nodes.findLast((each) => each.weights === weights && (task === "" || each.task === task));
    if (node !== undefined) return node;
    throw new ProvenanceError(
      `weights ${weights.slice(0, 16)}...: not in the server's log of bundle ${this.bundle.slice(0, 16)}..., of ` +
        `which this device knows ${this.seen.number} entries; the server cannot say where they come from`,
    );
  }

  private keep(entry: WeightsStatement, plain: boolean): void {
    const { number, weights, round_id: round } = entry;
    this.nodes.push({ number, weights, task: entry.task_id ?? "", plain, again: number, round });
  }
}

export interface Keys {
  readonly serverKey: Uint8Array;
  readonly enrolmentKey: Uint8Array;
}

/**
 * Checks that a secure round made the step of `entry`: its plan must be of this bundle, within its privacy policy, and
 * begin with the weights that `entry` changed; at least `threshold` of its survivors must have signed that they were in
 * it. Raises a ProtocolError that says what is missing.
 */
export async function checkEndorsement(
  entry: WeightsStatement,
  evidence: Endorsement,
  manifest: Manifest,
  log: LogReader,
  keys: Keys,
): Promise<void> {
  const where = `weights log, entry ${entry.number}, round ${entry.round_id}`;
  const refuse = (why: string): never => {
    throw new ProvenanceError(`${where}: ${why}`);
  };
  if ((await bodyDigest(evidence.plan)) !== entry.plan) refuse("the server shows another plan than the entry names");
  const plan = await unseal("plan", evidence.plan, keys.serverKey, roundPlan);
  if (plan.round_id !== entry.round_id || plan.task_id !== entry.task_id || plan.bundle !== entry.bundle) {
    refuse("its plan is of another round, task or bundle");
  }
  if (plan.kind !== "training" || plan.privacy !== "secure") {
    refuse(`its plan is of a ${plan.privacy} ${plan.kind} round, not of a secure training`);
  }
  // An asynchronous round's sum is added to the newest version, which may be later than the one that it began with.
  if (plan.weights !== entry.parent && plan.staleness_exponent === null) {
    refuse("its plan began with other weights than the entry's parent");
  }
  log.find(plan.weights, plan.task_id);
  // The policy is about the most that the manifest states, whatever clip the plan sets.
  checkPlan(plan, manifest.privacy, planLayout({ ...plan, hyperparameters: {} }, manifest));
  const { devices } = evidence.survivors;
  const survivors = new Set(devices);
  const needed = Math.max(plan.threshold, plan.min_cohort);
  if (survivors.size !== entry.devices || survivors.size < needed) {
    refuse(`${survivors.size} survivors; the entry names ${entry.devices}, the plan needs ${needed}`);
  }
  const signed = await signedByDevices(evidence, plan, where);
  // A set: one device that signs twice counts once. Its signature counts only under a chain of the enrolment key, so
  // that the server cannot invent devices.
  const counted = new Set<string>();
  for (const { chain, signature } of evidence.endorsers) {
    const device = await verifyChain(chain, keys.enrolmentKey, { population: entry.population });
    if (!survivors.has(device.deviceId)) refuse(`${device.deviceId}, which signed, is not one of the survivors`);
    if (!(await verifies(device.deviceKey, signature, signed))) {
      throw new CertificateError(`${where}: the confirmation of ${device.deviceId} does not verify`);
    }
    counted.add(device.deviceId);
  }
  const least = endorsersNeeded(plan);
  if (counted.size < least) {
    refuse(`${counted.size} devices signed that they were in it, ${least} are needed`);
  }
}
