/**
 * A secure round over a complete graph, from the keys to its result (archipel/client/rounds/secure.py).
 *
 * What the participant remembers is on the disk before anything that a step returned is sent, together with what it
 * returned. So the round goes on after a reload: the device sends the very same bytes once more, and takes the next
 * step (as archipel/client/rounds/neighbours.py does).
 */

import { sha256 } from "../../bundle/digests.js";
import type { Bytes } from "../bytes.js";
import type { Config } from "../config.js";
import { RoundAbandonedError } from "../errors.js";
import { encode } from "../messages/fields.js";
import type { RoundPlan } from "../messages/rounds.js";
import { cohort, type Complaints, complaints, confirmations, shares, survivors } from "../messages/secure.js";
import type { Participant } from "../secagg/participant.js";
import type { Entry } from "../storage/entry.js";
import type { OpenRound } from "../storage/journal.js";
import type { Layout } from "../updates/layout.js";
import { packMasked } from "../updates/packing.js";
import { type Ended, GoneError, LostError, type Owner, RoundExchange } from "./exchange.js";
import type { DeviceSession } from "./session.js";

/** The device's part of the round. */
export interface Part {
  readonly participant: Participant;
  readonly layout: Layout;
  /** The update of this layout. */
  readonly vector: (staleness: number) => Promise<Uint32Array>;
}

/** Where what a step returned is sent to. */
const PATHS = {
  advertising: "advertisement",
  sharing: "shares",
  complaining: "complaints",
  confirming: "confirmation",
  unmasking: "unmasking",
} as const;
type Said = keyof typeof PATHS;

/** The participant's step that comes after one of the journal, in their order. */
const NEXT: ReadonlyMap<string, Participant["next"]> = new Map([
  ["assigned", "advertise"],
  ["advertising", "share"],
  ["sharing", "complain"],
  ["complaining", "mask"],
  ["masked", "confirm"],
  ["confirming", "unmask"],
  ["unmasking", "done"],
]);

/** Where a device leaves, the server counts it as dropped out, and the others' shares make up for it. */
export class SecureRound extends RoundExchange {
  constructor(
    plan: RoundPlan,
    session: DeviceSession,
    config: Config,
    owner: Owner,
    private readonly journal: OpenRound,
    private readonly part: Part,
  ) {
    super(plan, session, config, owner);
  }

  /**
   * Carry out all phases, or those that are left after the journal's step.
   *
   * Raises RoundAbandonedError, LostError where what is kept does not fit, or ProtocolError for a message that the
   * device must not answer.
   */
  async run(): Promise<Ended> {
    // The order is the protocol's: each message depends on those that all devices sent in the phase before.
    const steps = [
      () => this.advertise(), () => this.share(), () => this.complain(), () => this.mask(), () => this.confirm(),
      () => this.unmask(),
    ];
    try {
      const { step } = this.journal.entry;
      if (step !== "assigned") await this.repeat(step);
      for (const each of steps.slice([...NEXT.keys()].indexOf(step))) await each();
    } catch (error) {
      if (!(error instanceof GoneError)) throw error;
      // Before the server counted the device, its update missed the phase. After that, only its help for the others is
      // late, and the round's result still matters.
      if (!this.journal.counted) throw new RoundAbandonedError(error.message);
    }
    return this.result();
  }

  private async advertise(): Promise<void> {
    await this.say("advertising", await this.part.participant.advertise());
    this.owner.report("advertised", {});
  }

  private async share(): Promise<void> {
    const members = await this.get("sharing", "cohort", cohort);
    await this.say("sharing", await this.part.participant.share(members));
    this.owner.report("shared", { cohort: members.members.length });
  }

  private async complain(): Promise<void> {
    const inbox = await this.get("complaining", "shares", shares);
    await this.say("complaining", await this.part.participant.complain(inbox));
  }

  private async mask(): Promise<void> {
    const { participant, layout, vector } = this.part;
    const list = await this.getComplaints();
    const staleness = this.plan.staleness_exponent === null ? 0 : (await this.status()).staleness;
    // Before masking: the device must not store masked bytes for a round that it leaves.
    await this.owner.check();
    const masked = packMasked(layout, await participant.mask(await vector(staleness), list), this.plan);
    const digest = await sha256(masked);
    await this.journal.storeMasked(masked, digest, this.secrets());
    this.owner.report("masked", { bytes: masked.length });
    await this.upload("masking", masked, digest);
  }

  private async confirm(): Promise<void> {
    // The device signs the set of survivors before it reveals a share: a server that names one set to some devices and
    // another set to others cannot collect `threshold` signatures for both.
    const named = await this.get("confirming", "survivors", survivors);
    const confirmation = await this.part.participant.confirm(named);
    const { length } = named.devices;
    // From here on the update may be in the sum, and the device's new state counts.
    await this.say("confirming", { confirmation }, { cohort: length });
    this.owner.report("confirmed", { survivors: length });
  }

  private async unmask(): Promise<void> {
    const confirmed = await this.get("unmasking", "confirmations", confirmations);
    await this.say("unmasking", await this.part.participant.unmask(confirmed));
    this.owner.report("unmasked", {});
  }

  /** Send what the last step returned, which may have been sent before. */
  private async repeat(step: Entry["step"]): Promise<void> {
    const { participant } = this.part;
    // Older secrets than the entry says, as from a copy that was put back, could say another thing.
    if (participant.next !== NEXT.get(step)) throw new LostError(`the stored secrets are not those of step ${step}`);
    if (step !== "masked") return this.put(step as Said, PATHS[step as Said], participant.said);
    const stored = await this.journal.masked();
    if (stored === null) throw new LostError("the masked bytes are lost, and the masks are gone");
    await this.upload("masking", stored.data, stored.digest);
  }

  /** The complaints of the round. Mostly there are none, which the round's status says without a request. */
  private async getComplaints(): Promise<Complaints> {
    // The status needs no proof: a later confirmation is a signature over the complaints, too.
    if (!(await this.reach("masking")).complaints) return { complaints: [] };
    return this.get("masking", "complaints", complaints);
  }

  private async say(step: Said, message: object, changes: Partial<Entry> = {}): Promise<void> {
    const body = encode(message);
    // Before the first byte leaves the device: after a reload it must say the same, and nothing else.
    await this.journal.advance(step, changes, this.secrets(body));
    await this.put(step, PATHS[step], body);
  }

  /** What the participant remembers, with what it is about to send; null where a reload ends the round. */
  private secrets(said: Bytes = new Uint8Array()): Bytes | null {
    return this.journal.entry.resumes ? this.part.participant.save(said) : null;
  }
}
