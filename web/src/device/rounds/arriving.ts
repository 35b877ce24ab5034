/** A file that arrives: what has come stays while the connection is made anew, and the rest is asked for. */

import { concat, type Bytes } from "../bytes.js";
import { TooLargeError } from "../errors.js";

const RANGE = /^bytes (\d+)-(\d+)\/(?:\d+|\*)$/;

/** The answer does not continue what has come; the next attempt begins anew. */
export class OtherPartError extends TypeError {}

export class Arriving {
  private parts: Uint8Array[] = [];
  private total = 0;

  constructor(
    private readonly server: string,
    private readonly limit: number,
    private readonly count: (bytes: number) => void = () => undefined,
  ) {}

  /** How many bytes have come. */
  get held(): number {
    return this.total;
  }

  /** The header that asks for the rest. */
  headers(): Readonly<Record<string, string>> {
    return this.total === 0 ? {} : { Range: `bytes=${this.total}-` };
  }

  /** Forget what has come, which cannot be continued. */
  drop(): void {
    this.parts = [];
    this.total = 0;
  }

  /**
   * Take an answer's body, and give all bytes. Raises TooLargeError, OtherPartError, or what the network raises: then
   * what came before stays.
   */
  async take(response: Response): Promise<Bytes> {
    let end: number | null = null;
    if (response.status === 206) {
      const found = RANGE.exec(response.headers.get("Content-Range") ?? "");
      if (found === null || Number(found[1]) !== this.total) {
        await response.body?.cancel();
        throw this.other("the server sent another part than the one asked for");
      }
      end = Number(found[2]) + 1;
    } else {
      // The whole file, whatever was asked for.
      this.drop();
    }
    const declared = this.total + Number(response.headers.get("Content-Length") ?? 0);
    if (declared > this.limit) {
      await response.body?.cancel();
      throw new TooLargeError(`${this.server}: the answer has ${declared} bytes, the limit here is ${this.limit}`);
    }
    const reader = response.body?.getReader();
    for (;;) {
      const part = await reader?.read();
      if (part?.value === undefined) break;
      this.count(part.value.length);
      if (this.total + part.value.length > this.limit) {
        await reader?.cancel();
        throw new TooLargeError(`${this.server}: the answer has more than ${this.limit} bytes, the limit here`);
      }
      this.total += part.value.length;
      this.parts.push(part.value);
    }
    if (end !== null && this.total < end) throw new TypeError(`the answer ended before byte ${end}`);
    if (end !== null && this.total > end) throw this.other("the answer is longer than it says");
    return concat(...this.parts);
  }

  private other(words: string): OtherPartError {
    this.drop();
    return new OtherPartError(words);
  }
}
