/** One round of this device, from the plan to its end: committed, failed, left or refused. */

import {
  BundleError, NonFiniteLossError, RuntimeInputError, RuntimeLimitError, RuntimeProgramError, SignatureError,
} from "../../errors.js";
import type { Bytes } from "../bytes.js";
import type { Device } from "../device.js";
import type { Enrolment } from "../enrolment.js";
import {
  CertificateError, ClientError, ConsistencyError, MessageError, OwnerRefusalError, PolicyError, ProtocolError,
  RefusedError, RoundAbandonedError, TooLargeError, UnreachableError,
} from "../errors.js";
import { type Outcome, outcome } from "../events.js";
import { OwnerLimits } from "../limits.js";
import { encode } from "../messages/fields.js";
import type { LeaveReason, RoundPlan } from "../messages/rounds.js";
import { noiseOf } from "../privacy.js";
import type { Revoked } from "../revocations.js";
import { type Identity, Participant } from "../secagg/participant.js";
import { Participant as NeighbourParticipant } from "../secagg_plus/participant.js";
import { termsOf } from "../secagg_plus/terms.js";
import { fetchRevoked } from "../storage/books.js";
import { Files } from "../storage/files.js";
import type { OpenRound } from "../storage/journal.js";
import { type Ended, isLater, LostError, type Owner, SilentError } from "./exchange.js";
import { NeighbourRound } from "./neighbour_round.js";
import type { Assigned } from "./resuming.js";
import { type Part, SecureRound } from "./secure_round.js";
import type { DeviceSession } from "./session.js";
import { Settling } from "./settling.js";
import { type Contribution, contribute, countExamples, type Prepared, prepare, prepareBundle } from "./work.js";

const REFUSALS = [
  BundleError, PolicyError, RuntimeLimitError, RuntimeProgramError, RuntimeInputError, CertificateError, MessageError,
];

/** The device's part in one round. */
export class Participation {
  private readonly plan: RoundPlan;
  private readonly settling: Settling;
  private readonly limits: OwnerLimits;
  private readonly files: Files;

  constructor(
    private readonly device: Device,
    private readonly session: DeviceSession,
    private readonly enrolment: Enrolment,
    private readonly assigned: Assigned,
  ) {
    this.plan = assigned.plan;
    this.settling = new Settling(device, session);
    this.limits = new OwnerLimits(device.config, enrolment, device.journal);
    this.files = new Files(device.database, session, device.config);
  }

  /**
   * Take part in the round. The outcome has `wait`, unless the round is to be taken up again. Raises UnreachableError
   * and RefusedError while it fetches what the round needs, and no later.
   */
  async run(wait: number): Promise<Outcome> {
    const journal = await this.device.journal.begin(this.plan, this.assigned.digest);
    this.device.report("assigned", { number: this.plan.number });
    return this.end(journal, () => this.carryOut(journal), wait);
  }

  /**
   * Go on with a round that a reload interrupted, as `run` would.
   *
   * Owner, publisher and revocations are asked again. Where what the round needs is lost, damaged or of another round,
   * the device leaves it.
   */
  async resume(journal: OpenRound, wait: number): Promise<Outcome> {
    this.device.report("resumed", {});
    return this.end(journal, () => this.goOn(journal), wait);
  }

  private async end(journal: OpenRound, work: () => Promise<Ended>, wait: number): Promise<Outcome> {
    let ended: Ended;
    try {
      ended = await work();
    } catch (error) {
      return this.fail(journal, error, wait);
    }
    return this.settling.conclude(journal, ended, wait);
  }

  private async fail(journal: OpenRound, error: unknown, wait: number): Promise<Outcome> {
    const why = reasonOf(error);
    const text = error instanceof Error ? error.message : String(error);
    if (error instanceof LostError) {
      const told = `the page was closed or loaded again in the round: ${text}`;
      if (!journal.counted) return this.settling.abandon(journal, told, wait);
      // The update is in the sum, so the result still matters; only the device's help for the others is lost.
      return (await this.settling.settle(journal, wait)) ?? this.pause(text);
    }
    // Before keys are sent such an error is about plan, bundle or weights, which the device refuses. Later it is about
    // a message of peers or server, and the device leaves.
    const kind = journal.keysSent ? "dropped" : "refused";
    if (REFUSALS.some((each) => error instanceof each)) return this.settling.end(journal, kind, text, wait, why);
    const left = error instanceof RoundAbandonedError;
    if (left || error instanceof NonFiniteLossError || error instanceof ProtocolError) {
      // Such a round goes on when the device does, or when the server answers again.
      const interrupted = error instanceof SilentError || (left && this.device.gate.stopped.aborted);
      if (left && journal.counted) {
        const settled = await this.settling.settle(journal, wait);
        if (settled !== null) return settled;
      } else if ((journal.keysSent || !left) && !(interrupted && journal.entry.resumes)) {
        // Where the server does not go on with this device it knows; and while the owner's conditions do not hold,
        // nothing is sent.
        return this.settling.end(journal, "dropped", text, wait, why, !left);
      }
      // The round stays open in the journal. If no keys were sent, the device may take it up again; if its update
      // counts, the next check-in asks for the result.
      return this.pause(text);
    }
    if (error instanceof ClientError) {
      if (error instanceof UnreachableError || (error instanceof RefusedError && isLater(error.status))) throw error;
      return this.settling.end(journal, kind, text, wait, why);
    }
    // From the page's functions, or from the browser's storage. A round without keys stays open, and may be taken up
    // again; so does one that goes on after a reload.
    if (journal.keysSent && !journal.entry.resumes) {
      await this.settling.end(journal, "dropped", `interrupted: ${text}`, wait, "other", false);
    }
    throw error;
  }

  private pause(reason: string): Outcome {
    this.device.report("paused", { reason });
    return outcome("paused", this.device.config.pauseSeconds, { roundId: this.plan.round_id, reason });
  }

  private async carryOut(journal: OpenRound): Promise<Ended> {
    const { device, plan, enrolment, files } = this;
    const revoked = await this.revoked();
    const prepared = await prepare(plan, device, enrolment, files, this.session, this.limits);
    await journal.advance("assigned", { model: prepared.bundle.manifest.name });
    if (prepared.origin !== null) await journal.takeOrigin(prepared.origin);
    await device.gate.passOrWait();
    const done = await this.contribute(prepared, journal);
    const { layout } = prepared;
    const encodeStale = (staleness: number): Uint32Array => {
      const arrays = layout.discount(done.arrays, staleness, plan.staleness_exponent ?? 0);
      return layout.encode(arrays, plan.modulus_bits, plan.max_cohort);
    };
    // Encode before keys are sent: a device that fails here has not joined the cohort yet.
    const fresh = layout.encode(done.arrays, plan.modulus_bits, plan.max_cohort);
    await journal.keep(encode(this.assigned.sealed), fresh, done.state);
    const vector = async (staleness: number) => (staleness ? encodeStale(staleness) : fresh);
    return (await this.inRound(journal, { ...prepared, vector }, revoked, null)).run();
  }

  private async goOn(journal: OpenRound): Promise<Ended> {
    const { device, plan, enrolment, files } = this;
    const revoked = await this.revoked();
    const { bundle, layout } = await prepareBundle(plan, device, enrolment, files, this.limits);
    await this.limits.checkExamples(plan, bundle.manifest, journal.entry.examples);
    await device.gate.passOrWait();
    const saved = await journal.kept("secrets");
    if (saved === null) throw new LostError("the secrets are lost");
    const vector = async (): Promise<Uint32Array> => {
      const kept = await journal.vector(layout.length);
      if (kept === null) throw new LostError("the vector is lost");
      return kept;
    };
    return (await this.inRound(journal, { bundle, layout, vector }, revoked, saved)).run();
  }

  /** With a new participant, or with the one that was stored last as `saved`. Raises LostError. */
  private async inRound(
    journal: OpenRound,
    { bundle, layout, vector }: Pick<Prepared, "bundle" | "layout"> & Pick<Part, "vector">,
    revoked: Revoked,
    saved: Bytes | null,
  ): Promise<SecureRound | NeighbourRound> {
    const { device, plan, identity } = this;
    const { digest } = this.assigned;
    const given = [plan, this.session, device.config, this.owner, journal] as const;
    if (plan.protocol === "neighbours") {
      const terms = termsOf(plan, digest, bundle.manifest.privacy);
      const participant = await (saved === null
        ? NeighbourParticipant.open(terms, identity, revoked)
        : orLost(NeighbourParticipant.resume(saved, terms, identity, revoked)));
      return new NeighbourRound(...given, { participant, server: terms.assumed.server, layout, vector });
    }
    const participant = await (saved === null
      ? Participant.open(plan, digest, identity, revoked)
      : orLost(Participant.resume(saved, plan, digest, identity, revoked)));
    return new SecureRound(...given, { participant, layout, vector });
  }

  private get owner(): Owner {
    const { gate, report } = this.device;
    return { pause: (seconds) => gate.pause(seconds), check: () => gate.passOrWait(), report };
  }

  private get identity(): Identity {
    const { chain, enrolmentKey } = this.enrolment;
    return { key: this.device.vault.identity, chain, enrolmentKey };
  }

  private async revoked(): Promise<Revoked> {
    // The owner's limits on the plan first of all: nothing is fetched for a round that the owner does not allow.
    await this.limits.checkPlan(this.plan);
    return fetchRevoked(this.device.database, this.files, this.enrolment, this.plan.revocations);
  }

  private async contribute(prepared: Prepared, journal: OpenRound): Promise<Contribution> {
    const { device, plan } = this;
    const started = performance.now();
    const fields = await device.examples();
    const { manifest } = prepared.bundle;
    // The limit on epsilon needs the number of examples, and nothing may be computed before it is checked.
    await this.limits.checkExamples(plan, manifest, countExamples(fields));
    const done = await contribute(prepared, plan, this.assigned.digest, fields, device);
    const { examples, steps } = done;
    // In the journal before any key is sent: the owner's totals include a round even if its end is never known.
    await journal.advance("assigned", { examples, steps, ...noiseOf(manifest, plan.program, examples) });
    const seconds = (performance.now() - started) / 1000;
    device.report("trained", { examples, steps, seconds, ...(done.loss === null ? {} : { loss: done.loss }) });
    return done;
  }
}

/** What was stored, or LostError where it is damaged or of another round or device. */
async function orLost<T>(resumed: Promise<T>): Promise<T> {
  try {
    return await resumed;
  } catch (error) {
    if (error instanceof MessageError || error instanceof ConsistencyError) throw new LostError(error.message);
    throw error;
  }
}

/** What the server may be told: the kind of limit or error, and never its text, which may tell of the examples. */
function reasonOf(error: unknown): LeaveReason {
  if (error instanceof OwnerRefusalError) return error.code as LeaveReason;
  if (error instanceof SignatureError) return "publisher";
  if (error instanceof PolicyError) return "policy";
  if (error instanceof RuntimeLimitError || error instanceof TooLargeError) return "size";
  if (error instanceof RuntimeInputError) return "data";
  if (error instanceof NonFiniteLossError) return "diverged";
  return error instanceof BundleError ? "bundle" : "other";
}
