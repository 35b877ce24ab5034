/** The gate that the device passes before work, between training steps and between messages. */

import type { Config } from "./config.js";
import { RoundAbandonedError } from "./errors.js";
import type { Report } from "./events.js";
import type { DeviceDatabase } from "./storage/database.js";

/** Whether the device may work: true or an empty text for yes, false or a reason for no. */
export type MayWork = () => Promise<boolean | string> | boolean | string;

export class Gate {
  private stopping = new AbortController();

  constructor(
    private readonly database: DeviceDatabase,
    private readonly config: Config,
    private readonly mayWork: MayWork | null,
    private readonly report: Report,
  ) {}

  get stopped(): AbortSignal {
    return this.stopping.signal;
  }

  /** End work and waiting. */
  stop(): void {
    this.stopping.abort();
  }

  /** Work may begin again after `stop`. */
  restart(): void {
    this.stopping = new AbortController();
  }

  /** Empty if the device may work, else the reason in one line for the owner. */
  async whyNot(): Promise<string> {
    // The owner's pause first: then the page's own function need not be called.
    const paused = await this.database.get<string>("own", "paused");
    if (paused !== undefined) return `paused by its owner${paused && `: ${paused}`}`;
    const answer = (await this.mayWork?.()) ?? true;
    if (typeof answer === "string") return answer && `the conditions for work do not hold: ${answer}`;
    return answer ? "" : "the conditions for work do not hold";
  }

  /**
   * Resolves at once if the device may work, else when it may; nothing is sent meanwhile. Raises RoundAbandonedError
   * after `resumeWithin` seconds, or when the device is stopped.
   */
  async passOrWait(): Promise<void> {
    this.checkStop();
    let reason = await this.whyNot();
    if (!reason) return;
    this.report("paused", { reason });
    const deadline = performance.now() + 1000 * this.config.resumeWithin;
    while (reason) {
      const left = (deadline - performance.now()) / 1000;
      if (left <= 0) {
        throw new RoundAbandonedError(`${reason}, for ${this.config.resumeWithin} seconds (setting resumeWithin)`);
      }
      await this.pause(Math.min(this.config.pauseSeconds, left));
      reason = await this.whyNot();
    }
    this.report("resumed", {});
  }

  /** Wait. Raises RoundAbandonedError when the device is stopped. */
  async pause(seconds: number): Promise<void> {
    this.checkStop();
    await sleep(seconds, this.stopped);
    this.checkStop();
  }

  private checkStop(): void {
    if (this.stopped.aborted) throw new RoundAbandonedError("the device was stopped");
  }
}

/** Resolves after so many seconds, or when the signal is aborted. */
export function sleep(seconds: number, signal: AbortSignal): Promise<void> {
  if (signal.aborted) return Promise.resolve();
  return new Promise((resolve) => {
    const done = (): void => {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, 1000 * seconds);
    signal.addEventListener("abort", done);
  });
}
