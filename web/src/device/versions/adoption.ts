/**
 * What a device does with the versions of models that the server offers (archipel/client/versions/adoption.py). Each
 * passes these steps:
 *
 *     offered     signed by the server's key, for this population, and not older than one that was seen
 *     fetched     within the owner's limits, the bundle signed by a pinned publisher        (fetching.ts)
 *     compared    with the running version, on the device's own examples                    (comparing.ts)
 *     adopted     tested, kept beside the running version, and switched to                  (running.ts)
 *
 * Whether a version is better here is a fact about this device's examples. So nothing that leaves the device depends on
 * it: what is fetched follows from what was offered and fetched before, check-ins report what was fetched, and the
 * decision is made without requests. The time that it took is hidden, too: the device is silent until `lookSeconds`
 * after it began, or a multiple of that, and it looks as often if there is nothing to decide.
 *
 * A version with which the server takes back the running one is not compared. What a reload interrupts begins again;
 * the slots alone say which version runs.
 */

import { ArchipelError, BundleError } from "../../errors.js";
import type { Device } from "../device.js";
import type { Enrolment } from "../enrolment.js";
import { ClientError, RoundAbandonedError } from "../errors.js";
import type { Sealed } from "../messages/identity.js";
import type { Offer } from "../messages/offers.js";
import type { DeviceSession } from "../rounds/session.js";
import { compare, type Verdict, verdict } from "./comparing.js";
import { ignoringFullStorage, isDeviceFailure, OfferFetcher } from "./fetching.js";
import { MAX_STARTS, OfferBook, type Standing } from "./offer_book.js";
import type { Content } from "./opening.js";
import type { RunningModels } from "./running.js";
import { runningSlot, type Slot, type SlotState, takesBack, whyGivenUp } from "./slots.js";

/** Handles the offers of one device. */
export class Adoption {
  private readonly book: OfferBook;
  private readonly fetcher: OfferFetcher;
  private silentUntil = 0;

  constructor(
    private readonly device: Device,
    private readonly models: RunningModels,
  ) {
    this.book = new OfferBook(device.database);
    this.fetcher = new OfferFetcher(device, this.book, (offer, reason) => this.tellKeptOut(offer, reason));
  }

  /**
   * What a check-in reports: by model the number of the version that was fetched last, whether it runs or not; null
   * where the owner wants no offers.
   */
  async fetchedVersions(): Promise<Record<string, number> | null> {
    if (!this.device.config.adopt) return null;
    const seen = Object.entries(await this.book.models());
    return Object.fromEntries(seen.flatMap(([model, { fetched }]) => (fetched ? [[model, fetched] as const] : [])));
  }

  /** For how many seconds the device must send nothing, whatever the last look decided. */
  get remainingSilence(): number {
    return Math.max(0, this.silentUntil - performance.now() / 1000);
  }

  /**
   * Fetch the offered versions, then adopt each or keep the running one; the events say which. Raises UnreachableError
   * and RefusedError as a check-in does.
   */
  async consider(offers: readonly Sealed[], session: DeviceSession, enrolment: Enrolment): Promise<void> {
    if (!this.device.config.adopt) return;
    try {
      await this.fetcher.fetch(offers, session, enrolment);
      await this.look(enrolment);
    } catch (error) {
      if (!(error instanceof RoundAbandonedError)) throw error;
      this.device.report("paused", { reason: error.message });
    }
  }

  // --- looking ------------------------------------------------------------------------------------------------------

  /** Decide about each fetched version that is due, without a request to the server. */
  private async look(enrolment: Enrolment): Promise<void> {
    const standing = Object.values(await this.book.models()).flatMap((seen) => seen.standing ?? []);
    const due = standing.filter((each) => this.book.isLookDue(each));
    for (const each of standing) if (!due.includes(each)) await this.tellOfFailure(each);
    if (!due.length) return;
    const [began, seconds] = [performance.now() / 1000, this.device.config.lookSeconds];
    try {
      for (const { offer } of due) await this.lookAt(offer, enrolment);
    } finally {
      // Counted from the beginning and in whole multiples, since a time from the end on would tell how long it took.
      const taken = performance.now() / 1000 - began;
      this.silentUntil = began + seconds * (1 + Math.floor(taken / seconds));
    }
  }

  private async lookAt(offer: Offer, enrolment: Enrolment): Promise<void> {
    let running: Slot | null = null;
    try {
      // First, and also if the version runs already: opening marks it as used in the cache, and so decides what is
      // fetched later.
      const cached = await this.openCached(offer, enrolment);
      if (cached instanceof ArchipelError && (await this.book.markLost(offer.model))) throw cached;
      const state = await this.models.slots.state(offer.model);
      running = runningSlot(state);
      const decided =
        running?.version === offer.version ? verdict(true, "") : await this.decide(offer, state, cached, enrolment);
      await ignoringFullStorage(this.book.markLooked(offer.model, decided.adopt ? "" : decided.reason));
    } catch (error) {
      if (error instanceof RoundAbandonedError || !(error instanceof ArchipelError)) throw error;
      // A failure after the verdict is not retried soon, because that would tell that the version was to be adopted.
      const soon = !(error instanceof AfterVerdictError) && isDeviceFailure(error);
      await ignoringFullStorage(this.book.markLooked(offer.model, error.message, soon));
      this.tell("kept", offer, running, verdict(false, error.message));
    }
  }

  private async openCached(offer: Offer, enrolment: Enrolment): Promise<Content | ArchipelError> {
    try {
      return await this.fetcher.openCached(offer, enrolment);
    } catch (error) {
      if (error instanceof ArchipelError) return error;
      throw error;
    }
  }

  /** Adopt the offered version or not. Raises what opening, comparing and installing it raise. */
  private async decide(
    offer: Offer,
    state: SlotState,
    cached: Content | ArchipelError,
    enrolment: Enrolment,
  ): Promise<Verdict> {
    const running = runningSlot(state);
    let decided: Verdict | null = null;
    if (running === null) {
      decided = verdict(true, "the first version of this model on this device");
    } else if (takesBack(offer, state)) {
      decided = verdict(true, `in place of version ${running.version}, which the server took back`);
      if (await this.models.goBack(offer, enrolment.publisherKeys)) {
        this.tell("adopted", offer, running, decided);
        return decided;
      }
    }
    // Not needed above: a return to the other slot works without the cache.
    if (cached instanceof ArchipelError) throw cached;
    await this.device.gate.passOrWait();
    // The start is counted on disk first: a version that makes the page crash must not do so for ever.
    if ((await this.book.begin(offer)) > MAX_STARTS) {
      await ignoringFullStorage(this.book.end(offer));
      throw new ClientError(`the page ended ${MAX_STARTS} times while it tried this version`);
    }
    try {
      if (decided === null) {
        decided = await this.compare(cached, offer.model, state, enrolment);
        await this.device.gate.passOrWait();
      }
      if (decided.adopt) await this.install(offer, cached);
    } finally {
      await ignoringFullStorage(this.book.end(offer));
    }
    this.tell(decided.adopt ? "adopted" : "kept", offer, running, decided);
    return decided;
  }

  private async compare(offered: Content, model: string, state: SlotState, enrolment: Enrolment): Promise<Verdict> {
    let present: Content;
    try {
      present = await this.models.content(model, state, enrolment.publisherKeys);
    } catch (error) {
      if (!(error instanceof BundleError)) throw error;
      const { version } = runningSlot(state) as Slot;
      return verdict(true, `version ${version}, which ran, is damaged: ${error.message}`);
    }
    return compare(this.device, offered, present);
  }

  private async install(offer: Offer, offered: Content): Promise<void> {
    try {
      await this.models.install(offer, offered);
    } catch (error) {
      if (!(error instanceof ArchipelError)) throw error;
      throw new AfterVerdictError(error.message);
    }
  }

  // --- the owner ----------------------------------------------------------------------------------------------------

  /** Report a version that was adopted, and that the slots have given up since, once for each reason. */
  private async tellOfFailure({ offer }: Standing): Promise<void> {
    const state = await this.models.slots.state(offer.model);
    const failed = whyGivenUp(state, offer);
    if (failed && (await this.book.noteReason(offer.model, failed))) {
      this.tell("kept", offer, runningSlot(state), verdict(false, failed));
    }
  }

  /** Report a version that could not be fetched, or must not be. */
  private async tellKeptOut(offer: Offer, reason: string): Promise<void> {
    this.tell("kept", offer, runningSlot(await this.models.slots.state(offer.model)), verdict(false, reason));
  }

  private tell(what: "adopted" | "kept", offer: Offer, running: Slot | null, { reason, measured }: Verdict): void {
    this.device.report(what, {
      model: offer.model,
      version: offer.version,
      [what === "adopted" ? "before" : "runs"]: running?.version ?? 0,
      reason,
      ...(measured ?? {}),
    });
  }
}

/** The device has decided to adopt a version, and could not install or run it. */
class AfterVerdictError extends ClientError {
  override name = "AfterVerdictError";
}
