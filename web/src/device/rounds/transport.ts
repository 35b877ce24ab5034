/** The connection to one server: requests with limits, repeated where that is safe (archipel/client/connection). */

import type { Decoder } from "../../bundle/decoders.js";
import { pauseOf } from "../../fetching.js";
import type { Bytes } from "../bytes.js";
import type { Config } from "../config.js";
import { MessageError, RefusedError, TooLargeError, UnreachableError } from "../errors.js";
import { decode } from "../messages/fields.js";
import { problem } from "../messages/rounds.js";
import { Arriving } from "./arriving.js";
import { waitAfter } from "./backoff.js";

const MAX_MESSAGE_BYTES = 16 << 20;
const MAX_PROBLEM_BYTES = 64 << 10;
/** The same request may succeed later; 502 and 504 come from proxies. */
export const TRY_AGAIN: ReadonlySet<number> = new Set([429, 503, 500, 502, 504]);

export interface Sending {
  readonly body?: Bytes | undefined;
  readonly headers?: Readonly<Record<string, string>> | undefined;
  /** Whether the request may be sent twice. Default: yes. */
  readonly retry?: boolean | undefined;
}

export class Transport {
  /** Bytes of bodies since the last `take`. */
  sent = 0;
  received = 0;
  private clock: { readonly server: number; readonly at: number } | null = null;

  /** `pause` waits between attempts (seconds), and may raise an error to give up. */
  constructor(
    private readonly server: string,
    private readonly config: Config,
    private readonly pause: (seconds: number) => Promise<void>,
    private readonly signal: () => AbortSignal,
    private readonly fetch: typeof globalThis.fetch,
  ) {}

  get attempts(): number {
    return this.config.attempts;
  }

  /** Unix seconds by the server's clock, from the last answer's Date; null before there is one that may be read. */
  get serverTime(): number | null {
    return this.clock === null ? null : this.clock.server + (performance.now() - this.clock.at) / 1000;
  }

  /** Send a request, and decode the answer strictly. Raises RefusedError, UnreachableError. */
  call<T>(method: string, path: string, decoder: Decoder<T>, sending: Sending = {}): Promise<T> {
    const read = (data: Bytes): T => decode(`${method} ${path}`, data, decoder);
    return this.exchange(method, path, MAX_MESSAGE_BYTES, read, sending);
  }

  /** As `call`, with an answer of at most `limit` bytes that is decoded by `read`. Raises TooLargeError, too. */
  exchange<T>(
    method: string,
    path: string,
    limit: number,
    read: (data: Bytes) => T,
    sending: Sending = {},
  ): Promise<T> {
    return this.send(method, path, sending, async (response) => read(await this.read(response, limit)));
  }

  /**
   * The bytes of a file, of which the caller checks the digest. After a break only the rest is fetched, and attempts
   * are counted from there on. Raises TooLargeError, RefusedError, UnreachableError.
   */
  async download(path: string, limit: number, headers: Readonly<Record<string, string>>): Promise<Bytes> {
    const file = new Arriving(this.server, limit, (bytes) => (this.received += bytes));
    const sending = (): Sending => ({ headers: { ...headers, ...file.headers() } });
    const ask = (): Promise<Bytes> =>
      this.send("GET", path, sending, (response) => file.take(response), () => file.held);
    try {
      return await ask();
    } catch (error) {
      const refused = error instanceof RefusedError && error.status === 416;
      if (file.held === 0 || !(refused || error instanceof UnreachableError)) throw error;
      // It has another file now, or is older and allows pages of other origins no ranges.
      file.drop();
      return await ask();
    }
  }

  async wait(attempt: number, asked: number | null = null): Promise<void> {
    await this.pause(waitAfter(attempt, this.config.backoff, this.config.maxWait, asked));
  }

  private async send<T>(
    method: string,
    path: string,
    given: Sending | (() => Sending),
    read: (response: Response) => Promise<T>,
    held: () => number = () => 0,
  ): Promise<T> {
    const attempts = typeof given !== "function" && given.retry === false ? 1 : this.config.attempts;
    for (let attempt = 1, before = held(); ; attempt++) {
      try {
        return await this.sendOnce(method, path, typeof given === "function" ? given() : given, read);
      } catch (error) {
        if (error instanceof TooLargeError) throw error;
        if (error instanceof RefusedError) {
          if (!TRY_AGAIN.has(error.status)) throw error;
        } else if (!isNetworkError(error)) {
          throw error;
        }
        if (held() > before) [attempt, before] = [0, held()];
        const asked = error instanceof RefusedError ? error.retryAfter : null;
        // The owner does not allow longer waits than `maxWait` here; the caller decides when to try again.
        if (attempt === attempts || (asked !== null && asked > this.config.maxWait)) {
          if (error instanceof RefusedError) throw error;
          throw new UnreachableError(
            `${this.server}: ${method} ${path} failed ${attempt} times, last: ${(error as Error).message}`,
          );
        }
        await this.wait(Math.max(attempt, 1), asked);
      }
    }
  }

  private async sendOnce<T>(
    method: string,
    path: string,
    { body, headers = {} }: Sending,
    read: (response: Response) => Promise<T>,
  ): Promise<T> {
    const content = body === undefined ? {} : { "Content-Type": "application/json" };
    // A function of its own, not called as a method: browsers want that of theirs.
    const { fetch } = this;
    const response = await fetch(this.server + path, {
      method,
      headers: { ...content, ...headers },
      ...(body === undefined ? {} : { body }),
      // Only what the device says in the request counts, and it goes to this server only.
      credentials: "omit",
      redirect: "error",
      cache: "no-store",
      referrerPolicy: "no-referrer",
      signal: AbortSignal.any([this.signal(), AbortSignal.timeout(1000 * this.config.requestTimeout)]),
    });
    this.sent += body?.length ?? 0;
    const date = Date.parse(response.headers.get("Date") ?? "");
    if (!Number.isNaN(date)) this.clock = { server: date / 1000, at: performance.now() };
    if ([200, 201, 206].includes(response.status)) return read(response);
    throw await this.refusal(response);
  }

  private async refusal(response: Response): Promise<RefusedError> {
    const { status } = response;
    const asked = response.headers.get("Retry-After");
    let words = "the server gave no reason";
    try {
      words = decode("problem", await this.read(response, MAX_PROBLEM_BYTES), problem).detail;
    } catch (error) {
      // Not a Problem but, for example, the page of a proxy: the status has to do.
      if (!(error instanceof MessageError || error instanceof TooLargeError)) throw error;
    }
    return new RefusedError(`${words} (${status})`, status, asked === null ? null : pauseOf(asked) / 1000);
  }

  private read(response: Response, limit: number): Promise<Bytes> {
    return new Arriving(this.server, limit, (bytes) => (this.received += bytes)).take(response);
  }
}

/**
 * `fetch` raises TypeError where the network fails, and DOMException where the time is over; a message may be garbled.
 */
function isNetworkError(error: unknown): boolean {
  if (error instanceof MessageError || error instanceof TypeError) return true;
  return error instanceof DOMException && ["TimeoutError", "NetworkError", "AbortError"].includes(error.name);
}
