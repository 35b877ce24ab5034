/**
 * A secure round over neighbours, from the keys to its result (archipel/client/rounds/neighbours.py).
 *
 * What the participant remembers is on the disk before anything that a step returned is sent, together with what it
 * returned. So the round goes on after a reload: the device sends the very same bytes once more, and takes the next
 * step.
 */

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
import { STEPS } from "../secagg_plus/state.js";
import type { Entry } from "../storage/entry.js";
import type { OpenRound } from "../storage/journal.js";
import type { Layout } from "../updates/layout.js";
import { packMasked } from "../updates/packing.js";
import { type Ended, GoneError, LostError, type Owner, RoundExchange } from "./exchange.js";
import type { DeviceSession } from "./session.js";

/** The device's part of the round. */
export interface NeighbourPart {
  readonly participant: Participant;
  /** What the device takes the server to be. */
  readonly server: Assumptions["server"];
  readonly layout: Layout;
  /** The update of this layout. */
  readonly vector: (staleness: number) => Promise<Uint32Array>;
}

const HEADERS = { "Content-Type": "application/msgpack" };

/** Where what a step returned is sent to; what was drawn is a part of a question, and the masked vector an upload. */
const PATHS = {
  advertising: "member",
  sharing: "dealt",
  complaining: "refused",
  confirming: "inclusions",
  unmasking: "answer",
} as const;
type Said = keyof typeof PATHS;

/** The participant's steps that may come after one of the journal. */
const NEXT: ReadonlyMap<string, readonly string[]> = new Map([
  ["advertising", ["draw", "deal"]],
  ["sharing", ["receive"]],
  ["complaining", ["mask"]],
  ["masked", ["confirm"]],
  ["confirming", ["answer"]],
  ["unmasking", ["done"]],
]);

/** The part of one device in one secure round over neighbours. */
export class NeighbourRound extends RoundExchange {
  constructor(
    plan: RoundPlan,
    session: DeviceSession,
    config: Config,
    owner: Owner,
    private readonly journal: OpenRound,
    private readonly part: NeighbourPart,
  ) {
    super(plan, session, config, owner);
  }

  /**
   * Carry out all steps, or those that are left after the journal's.
   *
   * Raises RoundAbandonedError, LostError where what is kept does not fit, or ProtocolError for a message that the
   * device must not answer.
   */
  async run(): Promise<Ended> {
    const { participant } = this.part;
    const steps: Readonly<Record<string, () => Promise<void>>> = {
      advertise: () => this.advertise(),
      draw: () => this.draw(),
      deal: () => this.deal(),
      receive: () => this.receive(),
      mask: () => this.mask(),
      confirm: () => this.confirm(),
      answer: () => this.answer(),
    };
    try {
      const { step } = this.journal.entry;
      if (step !== "assigned") await this.repeat(step);
      const first = (STEPS as readonly string[]).indexOf(participant.next);
      for (const name of STEPS.slice(first)) await steps[name]?.();
    } catch (error) {
      if (!(error instanceof GoneError)) throw error;
      // As in a round over a complete graph: before the server asked, the device's update missed its phase; after that
      // only its help for the others is late, and the round's result still matters.
      if (!this.journal.counted) throw new RoundAbandonedError(error.message);
    }
    return this.result();
  }

  private async advertise(): Promise<void> {
    await this.say("advertising", await this.part.participant.advertise());
    this.owner.report("advertised", {});
  }

  private async draw(): Promise<void> {
    const { participant } = this.part;
    const drawn = write(DRAWN, await participant.draw(await this.fetch("sharing", "invitation", INVITATION)));
    // Before the server is told: after a reload it must not draw anew, or a server could wait for a draw that it likes.
    await this.journal.advance("advertising", {}, this.secrets(drawn));
  }

  private async deal(): Promise<void> {
    const { participant } = this.part;
    const drawn = write(DRAWN, { places: participant.neighbours });
    const members = await this.fetch("sharing", "neighbours", NEIGHBOURS, drawn);
    await this.say("sharing", write(DEALT, await participant.deal(members)));
    this.owner.report("shared", { cohort: participant.cohort });
  }

  private async receive(): Promise<void> {
    const inbox = await this.fetch("complaining", "inbox", INBOX);
    await this.say("complaining", write(REFUSED, await this.part.participant.receive(inbox)));
  }

  private async mask(): Promise<void> {
    const { participant, layout, vector } = this.part;
    const partners = await this.fetch("masking", "partners", PARTNERS);
    const staleness = this.plan.staleness_exponent === null ? 0 : (await this.status()).staleness;
    // Before masking: the device must not store masked bytes for a round that it leaves.
    await this.owner.check();
    const masked = packMasked(layout, await participant.mask(await vector(staleness), partners), this.plan);
    const digest = await sha256(masked);
    await this.journal.storeMasked(masked, digest, this.secrets());
    this.owner.report("masked", { bytes: masked.length });
    await this.upload("masking", masked, digest);
  }

  private async confirm(): Promise<void> {
    const question = await this.fetch("confirming", "question", QUESTION);
    // Whoever is asked is in the sum, so from here on the device's new state counts. How many are in it nobody proves.
    await this.say("confirming", write(CONFIRMED, await this.part.participant.confirm(question)));
    this.owner.report("confirmed", {});
  }

  private async answer(): Promise<void> {
    const { participant, server } = this.part;
    const { question } = participant;
    if (question === null) throw new LostError("the question of the round is lost");
    const inclusions = server === "malicious" ? await this.fetch("unmasking", "inclusions", INCLUSIONS) : NOBODY_SAYS;
    await this.say("unmasking", write(ANSWER, await participant.answer(question, inclusions)));
    this.owner.report("unmasked", {});
  }

  /** Send what the last step returned, which may have been sent before. */
  private async repeat(step: Entry["step"]): Promise<void> {
    const { participant } = this.part;
    // Older secrets than the entry says, as from a copy that was put back, could say another thing.
    if (!NEXT.get(step)?.includes(participant.next)) {
      throw new LostError(`the stored secrets are not those of step ${step}`);
    }
    // What was drawn is a part of the next step's question.
    if (participant.next === "deal") return;
    if (step !== "masked") return this.tell(step as Said, participant.said);
    const stored = await this.journal.masked();
    if (stored === null) throw new LostError("the masked bytes are lost, and the masks are gone");
    await this.upload("masking", stored.data, stored.digest);
  }

  private async say(step: Said, said: Bytes): Promise<void> {
    // Before the first byte leaves the device: after a reload it must say the same, and nothing else.
    await this.journal.advance(step, {}, this.secrets(said));
    await this.tell(step, said);
  }

  private tell(step: Said, said: Bytes): Promise<void> {
    return this.deliver(step, () => this.session.call("PUT", `${this.url}/${PATHS[step]}`, receipt, said, HEADERS));
  }

  /** A message of the server, which it makes of `body` where there is one. */
  private fetch<T>(phase: Phase, path: string, kind: Kind<T>, body?: Bytes): Promise<T> {
    const [method, limit] = [body === undefined ? "GET" : "POST", kind.limit(this.plan)];
    const sending = body === undefined ? {} : { body, headers: HEADERS };
    const call = (): Promise<T> =>
      this.session.exchange(method, `${this.url}/${path}`, limit, (data) => read(kind, data), sending);
    return this.ask(phase, call);
  }

  /** What the participant remembers, with what it is about to send; null where a reload ends the round. */
  private secrets(said?: Bytes): Bytes | null {
    return this.journal.entry.resumes ? this.part.participant.save(said) : null;
  }
}
