/**
 * From an offer to its files in the cache: signed, for this population, within the owner's limits, in the weights log
 * (archipel/client/versions/fetching.py).
 *
 * What the device fetches follows from what was offered and fetched before, and from nothing else (see adoption.ts).
 */

import { sha256 } from "../../bundle/digests.js";
import { writeWeights } from "../../bundle/weights.js";
import { ArchipelError, StorageError } from "../../errors.js";
import { completeParameters } from "../../runtime/parameters.js";
import type { Bytes } from "../bytes.js";
import type { Device } from "../device.js";
import { type Enrolment, ofLog } from "../enrolment.js";
import {
  ClientError, MessageError, OwnerRefusalError, ProtocolError, RefusedError, RoundAbandonedError, UnreachableError,
} from "../errors.js";
import type { Sealed } from "../messages/identity.js";
import { type Offer, offer as offerMessage } from "../messages/offers.js";
import { checkOrigin } from "../origins.js";
import { isLater } from "../rounds/exchange.js";
import type { DeviceSession } from "../rounds/session.js";
import { unseal } from "../sealed.js";
import { checkPublished } from "../storage/books.js";
import { Files } from "../storage/files.js";
import { ExamplesError } from "./comparing.js";
import type { OfferBook } from "./offer_book.js";
import type { Content } from "./opening.js";

/** Fetches the offers of one device. `onKeptOut` is called for a version that cannot be fetched, or must not be. */
export class OfferFetcher {
  constructor(
    private readonly device: Device,
    private readonly book: OfferBook,
    private readonly onKeptOut: (offer: Offer, reason: string) => Promise<void>,
  ) {}

  /**
   * Fetch the offers that are genuine, new and due.
   *
   * Raises UnreachableError, RoundAbandonedError if the device may not work any more, and RefusedError if the session
   * has ended or the server asks the device to come later.
   */
  async fetch(offers: readonly Sealed[], session: DeviceSession, enrolment: Enrolment): Promise<void> {
    for (const offer of await this.read(offers, enrolment)) {
      if (await this.accept(offer)) await this.fetchOne(offer, session, enrolment);
    }
  }

  /** The version from the cache, without a request. Raises ArchipelError if it is not there, or not allowed. */
  openCached(offer: Offer, enrolment: Enrolment): Promise<Content> {
    const none = async (): Promise<Bytes> => {
      throw new ClientError("no longer in this device's cache");
    };
    return this.open(offer, { download: none }, enrolment);
  }

  /** The newest offer of each model, of those that the server's key has signed for this population. */
  private async read(offers: readonly Sealed[], { serverKey, population }: Enrolment): Promise<Offer[]> {
    const newest = new Map<string, Offer>();
    for (const sealed of offers) {
      try {
        const offer = await unseal("offer", sealed, serverKey, offerMessage);
        if (offer.population !== population) {
          throw new MessageError(`offer: for population ${offer.population}, this is ${population}`);
        }
        // A server may send several offers of a model; an older one must not be fetched, not even first.
        const before = newest.get(offer.model);
        if (before === undefined || before.serial < offer.serial) newest.set(offer.model, offer);
      } catch (error) {
        if (!(error instanceof ProtocolError)) throw error;
        this.device.report("refused", { reason: error.message });
      }
    }
    return [...newest.values()];
  }

  /** Record the offer in the book; whether to fetch it now. */
  private async accept(offer: Offer): Promise<boolean> {
    try {
      await this.book.recordOffer(offer);
      return await this.book.isFetchDue(offer.model);
    } catch (error) {
      if (!(error instanceof ArchipelError)) throw error;
      this.device.report("refused", { model: offer.model, version: offer.version, reason: error.message });
      return false;
    }
  }

  /** Fetch an offer into the cache, whatever the slots have. */
  private async fetchOne(offer: Offer, session: DeviceSession, enrolment: Enrolment): Promise<void> {
    this.device.report("offered", { model: offer.model, version: offer.version });
    await this.device.gate.passOrWait();
    try {
      const { bundle, weights } = await this.open(offer, session, enrolment);
      if (offer.weights !== null && weights !== null) {
        // Here, because this check asks the server, and looking must not.
        const files = this.files(session);
        const find = (digest: string) => files.keptWeights(digest);
        const given = { digest: offer.weights, tensors: weights };
        const log = ofLog(enrolment, bundle.manifest);
        await checkOrigin(this.device.database, bundle, given, find, session, log, null);
      }
      await this.book.markFetched(offer);
    } catch (error) {
      if (!(error instanceof ArchipelError) || isForTheCaller(error)) throw error;
      await ignoringFullStorage(this.book.retryFetch(offer.model, error.message, isDeviceFailure(error)));
      await this.onKeptOut(offer, error.message);
    }
  }

  /**
   * Open the version, and fetch what is not in the cache by `source`. Raises what the cache raises, OwnerRefusalError,
   * PolicyError, and RuntimeInputError for weights that are not the bundle's.
   */
  private async open(offer: Offer, source: Pick<DeviceSession, "download">, enrolment: Enrolment): Promise<Content> {
    const { config, database } = this.device;
    const files = this.files(source);
    const bundle = await files.bundle(offer.bundle, enrolment.publisherKeys);
    await checkPublished(database, bundle, enrolment.population, Date.now() / 1000);
    // Before the weights, which may be large.
    const peak = bundle.manifest.limits.peak_bytes;
    if (peak > config.maxPeakBytes) {
      const allowed = `its owner allows ${config.maxPeakBytes} (maxPeakBytes)`;
      throw new OwnerRefusalError(`bundle ${bundle.manifest.name}: up to ${peak} bytes of memory, ${allowed}`, "size");
    }
    if (offer.weights === null) return { version: offer.version, bundle, weights: null };
    const weights = await files.weights(offer.weights);
    completeParameters(bundle.manifest, Object.fromEntries(weights));
    // The bundle's own may be offered by name.
    const own = (await sha256(writeWeights(bundle.parameters()))) === offer.weights;
    return { version: offer.version, bundle, weights: own ? null : weights };
  }

  private files(source: Pick<DeviceSession, "download">): Files {
    return new Files(this.device.database, source, this.device.config);
  }
}

/** Whether an error is about the device's examples or storage, and so says nothing about the version. */
export function isDeviceFailure(error: unknown): boolean {
  return error instanceof ExamplesError || error instanceof StorageError;
}

/** Full storage must not end the agent: the book in memory has the change all the same. */
export async function ignoringFullStorage(change: Promise<unknown>): Promise<void> {
  try {
    await change;
  } catch (error) {
    if (!(error instanceof StorageError)) throw error;
  }
}

function isForTheCaller(error: unknown): boolean {
  if (error instanceof RefusedError) return isLater(error.status);
  return error instanceof RoundAbandonedError || error instanceof UnreachableError;
}
