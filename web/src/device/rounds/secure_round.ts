/** A secure round, from the keys to its result (archipel/client/rounds/secure.py). */

import { sha256 } from "../../bundle/digests.js";
import type { Config } from "../config.js";
import { RoundAbandonedError } from "../errors.js";
import { encode } from "../messages/fields.js";
import type { RoundPlan } from "../messages/rounds.js";
import { cohort, type Complaints, complaints, confirmations, shares, survivors } from "../messages/secure.js";
import type { Participant } from "../secagg/participant.js";
import type { OpenRound } from "../storage/journal.js";
import type { Layout } from "../updates/layout.js";
import { packMasked } from "../updates/packing.js";
import { type Ended, GoneError, type Owner, RoundExchange } from "./exchange.js";
import type { DeviceSession } from "./session.js";

/** Where a device leaves, the server counts it as dropped out, and the others' shares make up for it. */
export class SecureRound extends RoundExchange {
  constructor(
    plan: RoundPlan,
    session: DeviceSession,
    config: Config,
    owner: Owner,
    private readonly journal: OpenRound,
  ) {
    super(plan, session, config, owner);
  }

  /**
   * Carry out all phases, with `vector(staleness)` as the update of this layout. `onCounted` is called with the number
   * of devices in the sum when the server has named them, and before the device confirms them.
   *
   * Raises RoundAbandonedError, or ProtocolError for a message that the device must not answer.
   */
  async run(
    participant: Participant,
    layout: Layout,
    vector: (staleness: number) => Uint32Array,
    onCounted: (devices: number) => Promise<void>,
  ): Promise<Ended> {
    const { report } = this.owner;
    // The order is the protocol's: each message depends on those that all devices sent in the phase before.
    try {
      await this.say("advertising", "advertisement", await participant.advertise());
      report("advertised", {});
      const members = await this.get("sharing", "cohort", cohort);
      await this.say("sharing", "shares", await participant.share(members));
      report("shared", { cohort: members.members.length });
      const inbox = await this.get("complaining", "shares", shares);
      await this.say("complaining", "complaints", await participant.complain(inbox));
      await this.sendMasked(participant, layout, vector, await this.getComplaints());
      // The device signs the set of survivors before it reveals a share: a server that names one set to some devices
      // and another set to others cannot collect `threshold` signatures for both.
      const named = await this.get("confirming", "survivors", survivors);
      const confirmation = await participant.confirm(named);
      // Before the confirmation leaves: once it has, the update may be in the sum, so the state must be on disk.
      await onCounted(named.devices.length);
      await this.say("confirming", "confirmation", { confirmation });
      report("confirmed", { survivors: named.devices.length });
      const confirmed = await this.get("unmasking", "confirmations", confirmations);
      await this.say("unmasking", "unmasking", await participant.unmask(confirmed));
      report("unmasked", {});
    } catch (error) {
      if (!(error instanceof GoneError)) throw error;
      // Before the server counted the device, its update missed the phase. After that, only its help for the others is
      // late, and the round's result still matters.
      if (!this.journal.counted) throw new RoundAbandonedError(error.message);
    }
    return this.result();
  }

  /** The complaints of the round. Mostly there are none, which the round's status says without a request. */
  private async getComplaints(): Promise<Complaints> {
    // The status needs no proof: a later confirmation is a signature over the complaints, too.
    if (!(await this.reach("masking")).complaints) return { complaints: [] };
    return this.get("masking", "complaints", complaints);
  }

  private async sendMasked(
    participant: Participant,
    layout: Layout,
    vector: (staleness: number) => Uint32Array,
    list: Complaints,
  ): Promise<void> {
    const staleness = this.plan.staleness_exponent === null ? 0 : (await this.status()).staleness;
    // Before masking: the device must not store masked bytes for a round that it leaves.
    await this.owner.check();
    const masked = packMasked(layout, await participant.mask(vector(staleness), list), this.plan);
    const digest = await sha256(masked);
    await this.journal.storeMasked(masked, digest);
    this.owner.report("masked", { bytes: masked.length });
    await this.upload("masking", masked, digest);
  }

  private async say(
    step: "advertising" | "sharing" | "complaining" | "confirming" | "unmasking",
    path: string,
    message: object,
  ): Promise<void> {
    // Before the first byte leaves the device: after a reload it must not begin this round again with other keys.
    await this.journal.advance(step);
    await this.put(step, path, encode(message));
  }
}
