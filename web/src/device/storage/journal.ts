/**
 * The journal: what the device does in each round, on disk before the device does it
 * (archipel/client/memory/journal.py).
 *
 * The device records a step before it sends the step's message, and in the same transaction what the round needs to go
 * on after a reload: the secrets of secure aggregation, and once there are any the masked bytes. So the device never
 * sends other bytes for that step. All of this is sealed, and removed in the transaction that records the round's end.
 * A round that was interrupted after its keys were sent is never begun again: it would use a mask twice.
 */

import { sha256 } from "../../bundle/digests.js";
import { ClientError, PolicyError } from "../errors.js";
import type { RoundPlan } from "../messages/rounds.js";
import type { Bytes } from "../bytes.js";
import type { Change, DeviceDatabase } from "./database.js";
import { type Entry, NO_ROUNDS, plus, type Result, type Step, type Totals } from "./entry.js";
import { NO_PLANS, type Plans, takePlan, whyOld } from "./plan_book.js";
import type { SealedBytes, Vault } from "./vault.js";

const KEPT_ROUNDS = 256;
const DAY = 86400;

/**
 * Where in the store "sealed" a round's bytes are, beside its id: the plan as the server sealed it, the vector until it
 * is masked, the participant's secrets, the masked bytes, and the device's new state of the model.
 */
const BESIDE = ["plan", "vector", "secrets", "masked", "new-state"] as const;
type Beside = (typeof BESIDE)[number];

/** Where in the store "sealed" a model's present state is. */
export function statePlace(model: string): string {
  return `state/${model}`;
}

export class Journal {
  constructor(
    private readonly database: DeviceDatabase,
    private readonly vault: Vault,
    private readonly clock: () => number = () => Date.now() / 1000,
  ) {}

  /** Begin a round, or begin it again after an interruption. Raises ClientError where that must not be. */
  async begin(plan: RoundPlan, digest: string): Promise<OpenRound> {
    const before = await this.get(plan.round_id);
    if (before !== undefined && before.step !== "assigned") {
      throw new ClientError(`round ${plan.round_id}: this device has been in it already (step ${before.step})`);
    }
    const why = await this.whyOld(plan);
    if (why) throw new ClientError(`round ${plan.round_id}: its plan is an old one: ${why}`);
    const now = this.clock();
    const entry: Entry = {
      roundId: plan.round_id, taskId: plan.task_id, number: plan.number, plan: digest, bundle: plan.bundle, model: "",
      step: "assigned", started: now, changed: now, masked: null, result: "", reason: "", examples: 0, steps: 0,
      cohort: 0, noise: "unknown", rho: 0, sent: 0, received: 0,
      // In an asynchronous task the vector depends on when it is masked, so it cannot be kept before.
      resumes: plan.staleness_exponent === null,
      // Of the same round, which may be begun again: the root's plan was taken for it.
      ...(before?.origin === undefined ? {} : { origin: before.origin }),
    };
    await this.database.write(
      { store: "rounds", key: entry.roundId, value: entry },
      { store: "books", key: "plans", value: takePlan(await this.plans(), plan) },
      // Of an interrupted begin, which sent nothing.
      ...remove(plan.round_id),
    );
    return new OpenRound(this, entry);
  }

  /** Why the plan is one that the device took before; empty if it is new, or if its round may begin again. */
  async whyOld(plan: RoundPlan): Promise<string> {
    const before = await this.get(plan.round_id);
    return before?.step === "assigned" ? "" : whyOld(await this.plans(), plan);
  }

  get(roundId: string): Promise<Entry | undefined> {
    return this.database.get<Entry>("rounds", roundId);
  }

  /** The oldest round first. */
  async entries(): Promise<Entry[]> {
    return (await this.database.all<Entry>("rounds")).sort((one, other) => one.started - other.started);
  }

  /** The rounds that are not closed; after a reload, those that were interrupted. */
  async unfinished(): Promise<OpenRound[]> {
    const entries = await this.entries();
    return entries.filter((entry) => entry.step !== "closed").map((entry) => new OpenRound(this, entry));
  }

  /** How many rounds began in the last day and were not refused, without the round `besides`. */
  async begunToday(besides: string): Promise<number> {
    const since = this.clock() - DAY;
    return (await this.entries()).filter(
      (entry) => entry.started > since && entry.result !== "refused" && entry.roundId !== besides,
    ).length;
  }

  /** The sums over all rounds, without the round `besides`. */
  async totals(besides = ""): Promise<Totals> {
    const entries = await this.entries();
    return entries.filter(({ roundId }) => roundId !== besides).reduce(plus, await this.forgotten());
  }

  // --- for OpenRound ------------------------------------------------------------------------------------------------

  async record(entry: Entry, ...with_: readonly Change[]): Promise<Entry> {
    const changed = { ...entry, changed: this.clock() };
    await this.database.write({ store: "rounds", key: entry.roundId, value: changed }, ...with_);
    return changed;
  }

  async sealed(place: string, data: Uint8Array): Promise<Change> {
    return { store: "sealed", key: place, value: await this.vault.seal(place, data) };
  }

  /** The bytes at a place; null where there are none, or where they are damaged. */
  async open(place: string): Promise<Bytes | null> {
    const sealed = await this.database.get<SealedBytes>("sealed", place);
    if (sealed === undefined) return null;
    try {
      return await this.vault.open(place, sealed);
    } catch (error) {
      if (error instanceof ClientError) return null;
      throw error;
    }
  }

  /** The sums of old entries and their removal, in one transaction. */
  async forgetOld(): Promise<void> {
    const closed = (await this.entries()).filter((entry) => entry.step === "closed");
    // Two lists: a server that makes the device refuse round after round must not push the others from the journal.
    const refused = closed.filter((entry) => entry.result === "refused");
    const begun = closed.filter((entry) => entry.result !== "refused");
    const old = [...refused.slice(0, -KEPT_ROUNDS), ...begun.slice(0, -KEPT_ROUNDS)];
    if (!old.length) return;
    await this.database.write(
      { store: "books", key: "totals", value: old.reduce(plus, await this.forgotten()) },
      ...old.map((entry): Change => ({ store: "rounds", key: entry.roundId })),
    );
  }

  /** The plans that were taken: of the own server's rounds, or of the root's that these were parts of. */
  async plans(book: "plans" | "root-plans" = "plans"): Promise<Plans> {
    return (await this.database.get<Plans>("books", book)) ?? NO_PLANS;
  }

  private async forgotten(): Promise<Totals> {
    return (await this.database.get<Totals>("books", "totals")) ?? NO_ROUNDS;
  }
}

/** A round in the journal that is not closed yet. `entry` is as it is on disk. */
export class OpenRound {
  constructor(
    private readonly journal: Journal,
    public entry: Entry,
  ) {}

  /** Whether the server has said that this device's update is in the sum; the round can still fail. */
  get counted(): boolean {
    return this.entry.step === "confirming" || this.entry.step === "unmasking";
  }

  /** Whether a message of the round may have left the device. */
  get keysSent(): boolean {
    return this.entry.step !== "assigned";
  }

  /** Record that `step` begins, with these changes of the entry and the participant's secrets (null: as they are). */
  async advance(step: Step, changes: Partial<Entry> = {}, secrets: Uint8Array | null = null): Promise<void> {
    this.entry = await this.journal.record({ ...this.entry, ...changes, step }, ...(await this.sealedOf({ secrets })));
  }

  /**
   * Record the root's plan, verified, that this round is a part of. Raises PolicyError if the device has taken it before
   * in another round.
   */
  async takeOrigin(origin: RoundPlan): Promise<void> {
    // Begun again after an interruption: both were recorded in one transaction.
    if (this.entry.origin === origin.round_id) return;
    const taken = await this.journal.plans("root-plans");
    const why = whyOld(taken, origin);
    if (why) {
      throw new PolicyError(`round ${origin.round_id} of the root server: this device has been in it: ${why}`);
    }
    const change: Change = { store: "books", key: "root-plans", value: takePlan(taken, origin) };
    this.entry = await this.journal.record({ ...this.entry, origin: origin.round_id }, change);
  }

  /**
   * Store what the round needs after a reload, before keys are sent: the plan as the server sealed it, the vector to
   * mask, and the device's new state (null: none), which takes the place of the present one if the round counts.
   */
  async keep(plan: Uint8Array, vector: Uint32Array, state: Uint8Array | null): Promise<void> {
    const beside = { "new-state": state, ...(this.entry.resumes ? { plan, vector: bytesOf(vector) } : {}) };
    this.entry = await this.journal.record(this.entry, ...(await this.sealedOf(beside)));
  }

  /**
   * Store the masked bytes with the secrets from which those of the masks are gone (null: none are kept), remove the
   * vector, and record step "masked". Raises ClientError if there are masked bytes already.
   */
  async storeMasked(masked: Uint8Array, digest: string, secrets: Uint8Array | null = null): Promise<void> {
    if (this.entry.masked !== null) {
      throw new ClientError(`round ${this.entry.roundId}: masked bytes are stored already; they are never replaced`);
    }
    const changes = await this.sealedOf({ masked, secrets });
    changes.push({ store: "sealed", key: this.place("vector") });
    this.entry = await this.journal.record({ ...this.entry, step: "masked", masked: digest }, ...changes);
  }

  /** The masked bytes, which may be sent, and sent again; null if there are none. */
  async masked(): Promise<{ data: Bytes; digest: string } | null> {
    const digest = this.entry.masked;
    if (this.entry.step !== "masked" || digest === null) return null;
    const data = await this.kept("masked");
    // Lost bytes: the device drops out, and sends nothing more.
    return data !== null && (await sha256(data)) === digest ? { data, digest } : null;
  }

  /** What is kept beside the entry; null if it is not there, or damaged. */
  kept(what: Beside): Promise<Bytes | null> {
    return this.journal.open(this.place(what));
  }

  /** The vector that `keep` stored, if it has this length; null if it is not there, or damaged. */
  async vector(length: number): Promise<Uint32Array | null> {
    const data = await this.kept("vector");
    return data === null || data.length !== 4 * length ? null : new Uint32Array(data.buffer);
  }

  /** Close the round. Where it counts, the new state takes the place of the present one in the same transaction. */
  async close(result: Result, reason: string, sent: number, received: number): Promise<void> {
    const changes = remove(this.entry.roundId);
    const state = result === "took_part" ? await this.kept("new-state") : null;
    if (state !== null) changes.push(await this.journal.sealed(statePlace(this.entry.model), state));
    const entry: Entry = {
      ...this.entry, step: "closed", result, reason,
      sent: this.entry.sent + sent,
      received: this.entry.received + received,
    };
    this.entry = await this.journal.record(entry, ...changes);
    await this.journal.forgetOld();
  }

  private place(what: Beside): string {
    return placeOf(what, this.entry.roundId);
  }

  private sealedOf(beside: Partial<Record<Beside, Uint8Array | null>>): Promise<Change[]> {
    const there = BESIDE.flatMap((what) => (beside[what] == null ? [] : [[what, beside[what]] as const]));
    return Promise.all(there.map(([what, data]) => this.journal.sealed(this.place(what), data)));
  }
}

function placeOf(what: Beside, roundId: string): string {
  return `${what}/${roundId}`;
}

/** Removes what is beside the entry of a round. */
function remove(roundId: string): Change[] {
  return BESIDE.map((what) => ({ store: "sealed", key: placeOf(what, roundId) }));
}

/** In the order of this machine, on which alone they are read again. */
function bytesOf(vector: Uint32Array): Uint8Array {
  return new Uint8Array(vector.buffer, vector.byteOffset, vector.byteLength);
}
