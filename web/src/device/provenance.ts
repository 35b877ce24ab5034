/**
 * The log in which a server accounts for every change of a bundle's weights (archipel/protocol/provenance.py).
 *
 * The server signs each entry, which has the hash of the entry before, so it cannot show one device two histories; and
 * the entry of a secure round is endorsed by at least `threshold` of its devices. No step is longer than the strategy
 * lets it be, so that new weights can be measured against those that a device has.
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
import type { Rounds } from "./steps/distances.js";
import { endorsersNeeded } from "./secagg_plus/terms.js";
import { uploadLayout } from "./updates/uploads.js";

const FIRST = "0".repeat(64);
/** How many entries a device remembers of one log. */
const MAX_NODES = 1024;
/** For how many tasks it remembers the newest entry, however old that is. */
const MAX_TASKS = 256;
const MAX_ENTRY_BYTES = 1 << 14;

/** One checked entry. */
export interface Node {
  readonly number: number;
  readonly weights: string;
  readonly task: string;
  /** The number of the entry that it changed; 0 for a start. */
  readonly parent: number;
  /** How far its weights can be from the bundle's, as an L2 norm. */
  readonly bound: number;
  /** A step from the bundle's weights to these was not a secure round. */
  readonly plain: boolean;
  /** The number of the newest rollback to it, else its own. */
  readonly again: number;
  /** Null: these are the bundle's own weights, with which a training starts. */
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
  /** By number, in the log's order. */
  private readonly nodes = new Map<number, Node>();
  /** The number of the newest entry with these weights, of a task and of any. */
  private readonly newest = new Map<string, number>();
  private readonly rounds = new Set<string>();

  constructor(
    private readonly population: string,
    private readonly bundle: string,
    /** The digest of the bundle's own weights. */
    private readonly own: string,
    private readonly serverKey: Uint8Array,
    private seen: History,
    /** How long the step of an entry can be, as an L2 norm over all parameters. Raises ProtocolError. */
    private readonly bound: (entry: WeightsStatement) => number,
  ) {
    for (const node of seen.nodes) this.keep(node);
  }

  /**
   * What the device remembers: the newest entries, and two kinds that a later entry may name however old they are.
   * These are the bundle's own weights, to which a rollback may go, and the newest entry of a paused task.
   */
  get history(): History {
    const nodes = [...this.nodes.values()];
    const start = nodes.findLast(({ round }) => round === null);
    const tasks = [...new Map(nodes.map((node) => [node.task, node.number])).values()].sort((a, b) => a - b);
    const kept = new Set([...(start === undefined ? [] : [start.number]), ...tasks.slice(-MAX_TASKS)]);
    const others = nodes.filter(({ number }) => !kept.has(number));
    // MAX_NODES is more than MAX_TASKS + 1, so there is room for some of the others.
    for (const { number } of others.slice(kept.size - MAX_NODES)) kept.add(number);
    return { ...this.seen, nodes: nodes.filter(({ number }) => kept.has(number)) };
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
    const { weights, task_id: task, round_id: round } = entry;
    if (entry.kind === "start") {
      if (weights !== this.own || task === null) {
        throw new ProvenanceError(`${where}: a training starts with the bundle's own weights, this one with others`);
      }
      this.keep({ number, weights, task, parent: 0, bound: 0, plain: false, again: number, round: null });
    } else if (entry.kind === "rollback") {
      const node = this.find(weights);
      this.nodes.set(node.number, { ...node, again: number });
    } else {
      if (entry.parent === null || round === null || task === null || entry.plan === null) {
        throw new ProvenanceError(`${where}: a step names its task, round, plan and parent`);
      }
      // A round's endorsement vouches for one step: used twice, it would allow two steps of full length.
      if (this.rounds.has(round)) throw new ProvenanceError(`${where}: round ${round} has made a step already`);
      const parent = this.find(entry.parent, task);
      const moved = this.bound(entry);
      if (!(moved >= 0 && moved < Number.POSITIVE_INFINITY)) {
        throw new ProvenanceError(`${where}: its step has no bound`);
      }
      const plain = parent.plain || entry.privacy !== "secure";
      const bound = parent.bound + moved;
      this.keep({ number, weights, task, parent: parent.number, bound, plain, again: number, round });
    }
    // Last: after an entry that is refused the reader still stands at the entry before.
    this.seen = { ...this.seen, number, head: await bodyDigest(sealed) };
    return entry;
  }

  /** The newest entry with these weights, of `task` or of any. Raises ProvenanceError where there is none. */
  find(weights: string, task = ""): Node {
    const node = this.newestOf(weights, task);
    if (node !== undefined) return node;
    throw new ProvenanceError(
      `weights ${weights.slice(0, 16)}...: not in the server's log of bundle ${this.bundle.slice(0, 16)}..., of ` +
        `which this device knows ${this.seen.number} entries; the server cannot say where they come from`,
    );
  }

  /** As `find`, but undefined where the device remembers no such entry. */
  newestOf(weights: string, task = ""): Node | undefined {
    return this.nodes.get(this.newest.get(`${weights} ${task}`) ?? 0);
  }

  /** How far apart the weights of two entries can be, as an L2 norm. */
  boundBetween(one: Node, other: Node): number {
    // Through their nearest common ancestor: `bound` adds up the steps from the start. Where the device remembers none,
    // they are as far apart as through the bundle's own weights.
    const path = this.path(one);
    const common = Math.max(0, ...[...this.path(other)].filter((number) => path.has(number)));
    return one.bound + other.bound - 2 * (this.nodes.get(common)?.bound ?? 0);
  }

  /**
   * How many rounds lead back from the weights `one` to where `other` parted from them, and from there on to those.
   * Upper bounds where entries are forgotten.
   */
  roundsBetween(one: Node, other: Node): Rounds {
    const [first, second] = [this.path(one), this.path(other)];
    const back = [...first].filter((number) => !second.has(number)).length;
    const on = [...second].filter((number) => !first.has(number)).length;
    return back < first.size ? { back, on } : { back: this.roundsTo(one), on: this.roundsTo(other) };
  }

  /** How many rounds lead from the bundle's own weights to these; an upper bound where entries are forgotten. */
  roundsTo(node: Node): number {
    // A path that reaches a start has each round once; else the log has no more rounds than entries.
    const path = [...this.path(node)];
    return this.nodes.get(path.at(-1) as number)?.parent === 0 ? path.length - 1 : node.number;
  }

  /** The node and those that it was made of, as far as the device remembers them. */
  private path(node: Node): ReadonlySet<number> {
    const path = new Set([node.number]);
    for (let at = this.nodes.get(node.parent); at !== undefined; at = this.nodes.get(at.parent)) path.add(at.number);
    return path;
  }

  private keep(node: Node): void {
    const { number, weights, task, round } = node;
    this.nodes.set(number, node);
    if (round !== null) this.rounds.add(round);
    // Nodes come in the order of their numbers, so the newest overwrites older ones. "" stands for any task.
    for (const each of [task, ""]) this.newest.set(`${weights} ${each}`, number);
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
  // The policy is about the most that the manifest states, whatever clip the plan sets. Sites also send how many devices
  // they have, which no bound of it is about.
  checkPlan(plan, manifest.privacy, uploadLayout(manifest, plan.program));
  const { devices } = evidence.survivors;
  const survivors = new Set(devices);
  // The step's bound counts on so many devices, which so many sites must be able to have.
  const sites = plan.levels ? manifest.privacy.aggregators : null;
  const [fewest, most] = sites ? [survivors.size * sites.min_site_cohort, survivors.size * plan.site] : [0, 0];
  if (!(fewest <= entry.leaves && entry.leaves <= most)) {
    refuse(`${entry.leaves} devices below ${survivors.size} sites, expected from ${fewest} to ${most}`);
  }
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
    const expected = plan.levels ? "aggregator" : "device";
    if (device.kind !== expected) {
      refuse(`${device.deviceId}, which signed, is of kind ${device.kind}, expected ${expected}`);
    }
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
