/** A secure round over neighbours, from the keys to its result (archipel/client/rounds/neighbours.py). */

import { sha256 } from "../../bundle/digests.js";
import type { Bytes } from "../bytes.js";
import type { Config } from "../config.js";
import { RoundAbandonedError } from "../errors.js";
import { type Phase, receipt, type RoundPlan } from "../messages/rounds.js";
import {
  ANSWER, CONFIRMED, DEALT, DRAWN, INBOX, INCLUSIONS, INVITATION, type Kind, NEIGHBOURS, NOBODY_SAYS, PARTNERS,
  QUESTION, read, REFUSED, write,
} from "../secagg_plus/messages.js";
import type { Participant } from "../secagg_plus/participant.js";
import type { Assumptions } from "../secagg_plus/sizes.js";
import type { OpenRound } from "../storage/journal.js";
import type { Layout } from "../updates/layout.js";
import { packMasked } from "../updates/packing.js";
import { type Ended, GoneError, type Owner, RoundExchange } from "./exchange.js";
import type { DeviceSession } from "./session.js";

const HEADERS = { "Content-Type": "application/msgpack" };

/** The part of one device in one secure round over neighbours. */
export class NeighbourRound extends RoundExchange {
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
   * Carry out all phases, with `vector(staleness)` as the update of this layout. `server` is what the device takes it
   * to be.
   *
   * Raises RoundAbandonedError, or ProtocolError for a message that the device must not answer.
   */
  async run(
    participant: Participant,
    server: Assumptions["server"],
    layout: Layout,
    vector: (staleness: number) => Promise<Uint32Array>,
  ): Promise<Ended> {
    const { report } = this.owner;
    try {
      await this.say("advertising", "member", await participant.advertise());
      report("advertised", {});
      const invited = await this.fetch("sharing", "invitation", INVITATION);
      const drawn = write(DRAWN, await participant.drawNeighbours(invited));
      const members = await this.fetch("sharing", "neighbours", NEIGHBOURS, drawn);
      await this.say("sharing", "dealt", write(DEALT, await participant.deal(members)));
      report("shared", { cohort: invited.size });
      const inbox = await this.fetch("complaining", "inbox", INBOX);
      await this.say("complaining", "refused", write(REFUSED, await participant.receive(inbox)));
      await this.sendMasked(participant, layout, vector);
      const question = await this.fetch("confirming", "question", QUESTION);
      const confirmed = write(CONFIRMED, await participant.confirm(question));
      // A device that is asked is in the sum, so from here on its new state counts.
      await this.say("confirming", "inclusions", confirmed);
      report("confirmed", {});
      const inclusions =
        server === "malicious" ? await this.fetch("unmasking", "inclusions", INCLUSIONS) : NOBODY_SAYS;
      await this.say("unmasking", "answer", write(ANSWER, await participant.answer(question, inclusions)));
      report("unmasked", {});
    } catch (error) {
      if (!(error instanceof GoneError)) throw error;
      // As in a round over a complete graph: before the server asked, the device's update missed its phase; after that
      // only its help for the others is late, and the round's result still matters.
      if (!this.journal.counted) throw new RoundAbandonedError(error.message);
    }
    return this.result();
  }

  private async sendMasked(
    participant: Participant,
    layout: Layout,
    vector: (staleness: number) => Promise<Uint32Array>,
  ): Promise<void> {
    const partners = await this.fetch("masking", "partners", PARTNERS);
    const staleness = this.plan.staleness_exponent === null ? 0 : (await this.status()).staleness;
    // Before masking: the device must not store masked bytes for a round that it leaves.
    await this.owner.check();
    const masked = packMasked(layout, await participant.mask(await vector(staleness), partners), this.plan);
    const digest = await sha256(masked);
    await this.journal.storeMasked(masked, digest);
    this.owner.report("masked", { bytes: masked.length });
    await this.upload("masking", masked, digest);
  }

  private async say(
    step: "advertising" | "sharing" | "complaining" | "confirming" | "unmasking",
    path: string,
    said: Bytes,
  ): Promise<void> {
    // Before the first byte leaves the device: after a reload it must not begin this round again with other keys.
    await this.journal.advance(step);
    await this.deliver(step, () => this.session.call("PUT", `${this.url}/${path}`, receipt, said, HEADERS));
  }

  /** A message of the server, which it makes of `body` where there is one. */
  private fetch<T>(phase: Phase, path: string, kind: Kind<T>, body?: Bytes): Promise<T> {
    const [method, limit] = [body === undefined ? "GET" : "POST", kind.limit(this.plan)];
    const sending = body === undefined ? {} : { body, headers: HEADERS };
    const call = (): Promise<T> =>
      this.session.exchange(method, `${this.url}/${path}`, limit, (data) => read(kind, data), sending);
    return this.ask(phase, call);
  }
}
