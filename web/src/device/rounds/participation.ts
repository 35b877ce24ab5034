/** One round of this device, from the plan to its end: committed, failed, left or refused. */

import {
  BundleError, NonFiniteLossError, RuntimeInputError, RuntimeLimitError, RuntimeProgramError, SignatureError,
} from "../../errors.js";
import type { Device } from "../device.js";
import type { Enrolment } from "../enrolment.js";
import {
  CertificateError, ClientError, MessageError, OwnerRefusalError, PolicyError, ProtocolError, RefusedError,
  RoundAbandonedError, TooLargeError, UnreachableError,
} from "../errors.js";
import { type Outcome, outcome } from "../events.js";
import { OwnerLimits } from "../limits.js";
import type { LeaveReason, RoundPlan } from "../messages/rounds.js";
import { noiseOf } from "../privacy.js";
import { Participant } from "../secagg/participant.js";
import { Participant as NeighbourParticipant } from "../secagg_plus/participant.js";
import { termsOf } from "../secagg_plus/terms.js";
import { fetchRevoked } from "../storage/books.js";
import { Files } from "../storage/files.js";
import type { OpenRound } from "../storage/journal.js";
import { type Ended, isLater } from "./exchange.js";
import { NeighbourRound } from "./neighbour_round.js";
import { SecureRound } from "./secure_round.js";
import type { DeviceSession } from "./session.js";
import { Settling } from "./settling.js";
import { type Contribution, contribute, countExamples, type Prepared, prepare } from "./work.js";

const REFUSALS = [
  BundleError, PolicyError, RuntimeLimitError, RuntimeProgramError, RuntimeInputError, CertificateError, MessageError,
];

/** The device's part in one round; `digest` is the plan's. */
export class Participation {
  private readonly settling: Settling;
  private readonly limits: OwnerLimits;

  constructor(
    private readonly device: Device,
    private readonly session: DeviceSession,
    private readonly enrolment: Enrolment,
    private readonly plan: RoundPlan,
    private readonly digest: string,
  ) {
    this.settling = new Settling(device, session);
    this.limits = new OwnerLimits(device.config, enrolment, device.journal);
  }

  /**
   * Take part in the round. The outcome has `wait`, unless the round is to be taken up again. Raises UnreachableError
   * and RefusedError while it fetches what the round needs, and no later.
   */
  async run(wait: number): Promise<Outcome> {
    const journal = await this.device.journal.begin(this.plan, this.digest);
    this.device.report("assigned", { number: this.plan.number });
    let ended: Ended;
    try {
      ended = await this.carryOut(journal);
    } catch (error) {
      return this.fail(journal, error, wait);
    }
    return this.settling.conclude(journal, ended, wait);
  }

  private async fail(journal: OpenRound, error: unknown, wait: number): Promise<Outcome> {
    const why = reasonOf(error);
    const text = error instanceof Error ? error.message : String(error);
    // Before keys are sent such an error is about plan, bundle or weights, which the device refuses. Later it is about
    // a message of peers or server, and the device leaves.
    const kind = journal.keysSent ? "dropped" : "refused";
    if (REFUSALS.some((each) => error instanceof each)) return this.settling.end(journal, kind, text, wait, why);
    const left = error instanceof RoundAbandonedError;
    if (left || error instanceof NonFiniteLossError || error instanceof ProtocolError) {
      if (left && journal.counted) {
        const settled = await this.settling.settle(journal, wait);
        if (settled !== null) return settled;
      } else if (journal.keysSent || !left) {
        // Where the server does not go on with this device it knows; and while the owner's conditions do not hold,
        // nothing is sent.
        return this.settling.end(journal, "dropped", text, wait, why, !left);
      }
      // The round stays open in the journal. If no keys were sent, the device may take it up again; if its update
      // counts, the next check-in asks for the result.
      this.device.report("paused", { reason: text });
      const { roundId } = journal.entry;
      return outcome("paused", this.device.config.pauseSeconds, { roundId, reason: text });
    }
    if (error instanceof ClientError) {
      if (error instanceof UnreachableError || (error instanceof RefusedError && isLater(error.status))) throw error;
      return this.settling.end(journal, kind, text, wait, why);
    }
    // From the page's functions. A round without keys stays open, and may be taken up again.
    if (journal.keysSent) await this.settling.end(journal, "dropped", `interrupted: ${text}`, wait, "other", false);
    throw error;
  }

  private async carryOut(journal: OpenRound): Promise<Ended> {
    const { device, plan, enrolment } = this;
    const files = new Files(device.database, this.session, device.config);
    // The owner's limits on the plan first of all: nothing is fetched for a round that the owner does not allow.
    await this.limits.checkPlan(plan);
    const revoked = await fetchRevoked(device.database, files, enrolment, plan.revocations);
    const prepared = await prepare(plan, device, enrolment, files, this.session, this.limits);
    await journal.advance("assigned", { model: prepared.bundle.manifest.name });
    await device.gate.passOrWait();
    const done = await this.contribute(prepared, journal);
    const { layout } = prepared;
    const identity = { key: device.vault.identity, chain: enrolment.chain, enrolmentKey: enrolment.enrolmentKey };
    const encodeStale = (staleness: number): Uint32Array => {
      const arrays = layout.discount(done.arrays, staleness, plan.staleness_exponent ?? 0);
      return layout.encode(arrays, plan.modulus_bits, plan.max_cohort);
    };
    // Encode before keys are sent: a device that fails here has not joined the cohort yet.
    const fresh = layout.encode(done.arrays, plan.modulus_bits, plan.max_cohort);
    const vector = (staleness: number): Uint32Array => (staleness ? encodeStale(staleness) : fresh);
    const owner = {
      pause: (seconds: number) => device.gate.pause(seconds),
      check: () => device.gate.passOrWait(),
      report: device.report,
    };
    if (plan.protocol === "neighbours") {
      const terms = termsOf(plan, this.digest, prepared.bundle.manifest.privacy);
      const acting = await NeighbourParticipant.open(terms, identity, revoked);
      return new NeighbourRound(plan, this.session, device.config, owner, journal).run(
        acting,
        terms.assumed.server,
        layout,
        vector,
        // 0: over neighbours nobody proves to a device how many there are in the sum.
        () => journal.storeState(done.state, 0),
      );
    }
    const participant = await Participant.open(plan, this.digest, identity, revoked);
    return new SecureRound(plan, this.session, device.config, owner, journal).run(
      participant,
      layout,
      vector,
      (devices) => journal.storeState(done.state, devices),
    );
  }

  private async contribute(prepared: Prepared, journal: OpenRound): Promise<Contribution> {
    const { device, plan } = this;
    const started = performance.now();
    const fields = await device.examples();
    const { manifest } = prepared.bundle;
    // The limit on epsilon needs the number of examples, and nothing may be computed before it is checked.
    await this.limits.checkExamples(plan, manifest, countExamples(fields));
    const done = await contribute(prepared, plan, this.digest, fields, device);
    const { examples, steps } = done;
    // In the journal before any key is sent: the owner's totals include a round even if its end is never known.
    await journal.advance("assigned", { examples, steps, ...noiseOf(manifest, plan.program, examples) });
    const seconds = (performance.now() - started) / 1000;
    device.report("trained", { examples, steps, seconds, ...(done.loss === null ? {} : { loss: done.loss }) });
    return done;
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
