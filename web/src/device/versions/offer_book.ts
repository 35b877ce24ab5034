/**
 * What a device remembers of offered versions (archipel/client/versions/offer_book.py).
 *
 * The book does not say which version runs: the slots do. Nothing in it may make the requests of a device that runs the
 * offered version differ from those of another device (see adoption.ts).
 */

import { ProtocolError } from "../errors.js";
import { MAX_MODELS } from "../messages/fields.js";
import type { Offer } from "../messages/offers.js";
import type { DeviceDatabase } from "../storage/database.js";

const RETRY_SECONDS = 86400;
/** After a failure that says nothing about the version, such as full storage or examples that cannot be read. */
const RETRY_SOON_SECONDS = 600;
export const MAX_STARTS = 3;
const MAX_REASON = 500;
const KEY = "offers";

/** The newest offer of a model, and what this device has done about it. Times are Unix seconds. */
export interface Standing {
  readonly offer: Offer;
  /** All its files were here and verified. */
  readonly fetched: boolean;
  /** When to try fetching again, while they are not. */
  readonly again: number;
  /** When the device looks next whether to adopt it. */
  readonly look: number;
  /** The device has looked and decided, whatever the decision. */
  readonly decided: boolean;
  /** Why the version does not run, as the owner was told last. */
  readonly reason: string;
}

/** What is known of one model. */
export interface Seen {
  readonly standing: Standing | null;
  /** The number of the version that was fetched last, which check-ins report (0: none). */
  readonly fetched: number;
  /** The version whose trial began `starts` times in a row and never ended (0: none). */
  readonly begun: number;
  readonly starts: number;
}

type Book = Readonly<Record<string, Seen>>;

const NOTHING: Seen = { standing: null, fetched: 0, begun: 0, starts: 0 };

/** Every change is in the database when it resolves. `clock` gives Unix seconds. */
export class OfferBook {
  private book: Book | null = null;

  constructor(
    private readonly database: DeviceDatabase,
    private readonly clock: () => number = () => Date.now() / 1000,
  ) {}

  async models(): Promise<Book> {
    this.book ??= (await this.database.get<Book>("books", KEY)) ?? {};
    return this.book;
  }

  async get(model: string): Promise<Seen> {
    return (await this.models())[model] ?? NOTHING;
  }

  /**
   * Record an offer: from now on no older one of its model counts, and the device looks at this one. Raises
   * ProtocolError for an old offer and for one model too many.
   */
  async recordOffer(offer: Offer): Promise<void> {
    const book = await this.models();
    if (book[offer.model] === undefined && Object.keys(book).length >= MAX_MODELS) {
      throw new ProtocolError(`offer: one model more than the ${MAX_MODELS} that a device remembers`);
    }
    const before = (await this.get(offer.model)).standing;
    if (before !== null && offer.serial < before.offer.serial) {
      throw new ProtocolError(`offer: serial ${offer.serial} is older than ${before.offer.serial}, which was seen`);
    }
    if (before === null || !isSameVersion(before.offer, offer)) {
      const standing = { offer, fetched: false, again: 0, look: 0, decided: false, reason: "" };
      await this.change(offer.model, { standing });
    } else if (offer.serial > before.offer.serial) {
      // The same version under a newer serial: its files stay fetched, and it is looked at once more.
      await this.change(offer.model, { standing: { ...before, offer, again: 0, look: 0 } });
    }
  }

  /** Whether to fetch the newest offer now. */
  async isFetchDue(model: string): Promise<boolean> {
    const { standing } = await this.get(model);
    return standing !== null && !standing.fetched && this.isDue(standing.again);
  }

  /** Whether it is time to look at this offer, whose files are here. */
  isLookDue(standing: Standing | null): boolean {
    return standing !== null && standing.fetched && this.isDue(standing.look);
  }

  /** The newest offer's files are here; check-ins report it from now on. */
  async markFetched(offer: Offer): Promise<void> {
    // Due for a look at once; an earlier decision was about files that are lost.
    await this.changeStanding(offer.model, { fetched: true, look: 0, decided: false }, { fetched: offer.version });
  }

  /** Fetching failed for `reason`; try it again in a day, or soon. */
  async retryFetch(model: string, reason: string, soon: boolean): Promise<void> {
    await this.changeStanding(model, { again: this.retryAt(soon), reason: reason.slice(0, MAX_REASON) });
  }

  /** The device has looked. `soon`: it could not decide, and looks again in a while. */
  async markLooked(model: string, reason = "", soon = false): Promise<void> {
    const { standing } = await this.get(model);
    // A look that could not decide leaves an earlier decision as it is.
    const decided = !soon || (standing?.decided ?? false);
    await this.changeStanding(model, { look: this.retryAt(soon), decided, reason: reason.slice(0, MAX_REASON) });
  }

  /** The files are no longer here. Whether to fetch them again: until the device has decided. */
  async markLost(model: string): Promise<boolean> {
    const { standing } = await this.get(model);
    if (standing === null || standing.decided) return false;
    // Check-ins stop reporting the version, too: they report what is here.
    await this.changeStanding(model, { fetched: false, again: 0 }, { fetched: 0 });
    return true;
  }

  /** The owner is told this reason; false if it is the one that was told last. */
  async noteReason(model: string, reason: string): Promise<boolean> {
    const { standing } = await this.get(model);
    const short = reason.slice(0, MAX_REASON);
    if (standing === null || standing.reason === short) return false;
    await this.changeStanding(model, { reason: short });
    return true;
  }

  /** Count the start of a trial, which may end the page; which one in a row this is. */
  async begin(offer: Offer): Promise<number> {
    const seen = await this.get(offer.model);
    const starts = seen.begun === offer.version ? seen.starts + 1 : 1;
    await this.change(offer.model, { begun: offer.version, starts });
    return starts;
  }

  /** The trial has ended, whatever its result. */
  async end(offer: Offer): Promise<void> {
    await this.change(offer.model, { begun: 0, starts: 0 });
  }

  private retryAt(soon: boolean): number {
    return this.clock() + (soon ? RETRY_SOON_SECONDS : RETRY_SECONDS);
  }

  private isDue(at: number): boolean {
    const left = at - this.clock();
    // A time further in the future than any retry was set before the clock was set back: it is due now.
    return !(left > 0 && left <= RETRY_SECONDS);
  }

  private async changeStanding(model: string, changes: Partial<Standing>, more: Partial<Seen> = {}): Promise<void> {
    const { standing } = await this.get(model);
    if (standing !== null) await this.change(model, { ...more, standing: { ...standing, ...changes } });
  }

  private async change(model: string, changes: Partial<Seen>): Promise<void> {
    const before = await this.get(model);
    // Memory first: if the storage is full, this page at least does not try the same thing over and over.
    this.book = { ...(await this.models()), [model]: { ...before, ...changes } };
    if (JSON.stringify(this.book[model]) !== JSON.stringify(before)) {
      await this.database.write({ store: "books", key: KEY, value: this.book });
    }
  }
}

/** Whether both offers are of the same files under the same number. */
function isSameVersion(one: Offer, other: Offer): boolean {
  return one.version === other.version && one.bundle === other.bundle && one.weights === other.weights;
}
