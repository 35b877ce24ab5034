/**
 * Check-ins that the server may keep back until the device is in a round (archipel/client/connection/waiting.py).
 *
 * On the way to the server something may cut a connection off that is silent for long. That is an ordinary end of
 * waiting: the device checks in once more, without waiting, and for a while it asks for less than it was cut off after.
 */

import type { Config } from "../config.js";
import { RefusedError, RoundAbandonedError, UnreachableError } from "../errors.js";
import { encode } from "../messages/fields.js";
import { type CheckInResponse, checkInResponse } from "../messages/rounds.js";
import type { DeviceSession } from "./session.js";

/** For less, the server need not keep anything back. */
const SHORTEST = 1;
/** For how long a device asks for less after it was cut off. */
const CAUTIOUS_SECONDS = 3600;
/** What proxies answer that do not wait for the server any longer. */
const CUT: ReadonlySet<number> = new Set([502, 504]);

export class Waiting {
  private less = 0;
  private until = 0;

  constructor(private readonly config: Config) {}

  /** For how long (seconds) the next check-in may be kept back; 0: not at all. */
  get seconds(): number {
    // An answer that takes longer than `requestTimeout` would be given up.
    const most = Math.min(this.config.waitSeconds, this.config.requestTimeout / 1.5);
    const seconds = performance.now() / 1000 < this.until ? this.less : most;
    return seconds >= SHORTEST ? Math.round(1000 * seconds) / 1000 : 0;
  }

  /**
   * Check in with this report. With `patient` the server may keep its answer back. Raises RoundAbandonedError when the
   * device is stopped, RefusedError, UnreachableError.
   */
  async checkIn(
    session: DeviceSession,
    report: object,
    patient: boolean,
    stopped: () => boolean,
  ): Promise<CheckInResponse> {
    const send = (wait: number): Promise<CheckInResponse> => {
      const body = encode({ ...report, wait: wait || undefined });
      return session.call("POST", "/v1/check-ins", checkInResponse, body, {}, !wait);
    };
    const seconds = patient ? this.seconds : 0;
    if (!seconds) return send(0);
    const began = performance.now();
    try {
      return await send(seconds);
    } catch (error) {
      if (stopped()) throw new RoundAbandonedError("the device was stopped");
      const cut = error instanceof UnreachableError || (error instanceof RefusedError && CUT.has(error.status));
      if (!cut) throw error;
    }
    const now = performance.now() / 1000;
    [this.less, this.until] = [0.8 * Math.min(now - began / 1000, seconds), now + CAUTIOUS_SECONDS];
    return send(0);
  }
}
