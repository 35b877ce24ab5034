/** The messages between a device and the server in a round (archipel/client/rounds/exchange.py). */

import type { Decoder } from "../../bundle/decoders.js";
import type { Bytes } from "../bytes.js";
import type { Config } from "../config.js";
import { RefusedError, RoundAbandonedError, UnreachableError } from "../errors.js";
import type { Report } from "../events.js";
import { type Phase, PHASES, receipt, type RoundPlan, type RoundStatus, roundStatus } from "../messages/rounds.js";
import { jittered, waitAfter } from "./backoff.js";
import type { DeviceSession } from "./session.js";
import { TRY_AGAIN } from "./transport.js";
import { sendUpdate } from "./uploading.js";

const SHORTEST_WAIT = 0.01;

/** Whether a server that answers so cannot answer now; 401: the session has retried it with a new token. */
export function isLater(status: number): boolean {
  return status === 401 || TRY_AGAIN.has(status);
}

/** How a round ended for a device whose update the server has. */
export interface Ended {
  readonly counted: boolean;
  readonly reason: string;
}

/** What a round asks of its device between messages. */
export interface Owner {
  /** Waits (seconds); raises RoundAbandonedError when the device is stopped. */
  readonly pause: (seconds: number) => Promise<void>;
  /** Waits while the owner's conditions do not hold; raises RoundAbandonedError when the device must leave. */
  readonly check: () => Promise<void>;
  readonly report: Report;
}

/** The server has not answered for `patience` seconds. */
export class SilentError extends RoundAbandonedError {}

/** What the round needs after a reload is lost, damaged, or of another round. */
export class LostError extends Error {
  override name = "LostError";
}

/** The phase is over (410). */
export class GoneError extends Error {
  override name = "GoneError";
}

/** The phase has not begun, or another message of this device is stored (409). */
class TooEarlyError extends Error {
  override name = "TooEarlyError";
}

/** The part of one device in one round: it sends, polls and waits within the owner's patience. */
export class RoundExchange {
  protected readonly url: string;
  private readonly started = performance.now();
  private lastAnswer = this.started;

  constructor(
    protected readonly plan: RoundPlan,
    protected readonly session: DeviceSession,
    private readonly config: Config,
    protected readonly owner: Owner,
  ) {
    this.url = `/v1/rounds/${plan.round_id}`;
  }

  async upload(phase: Phase, data: Bytes, digest: string): Promise<void> {
    const answered = (): void => this.hear();
    await this.deliver(phase, () => sendUpdate(this.session, this.plan.round_id, data, digest, answered));
    this.owner.report("uploaded", { bytes: data.length });
  }

  async put(phase: Phase, path: string, body: Bytes): Promise<void> {
    await this.deliver(phase, () => this.session.call("PUT", `${this.url}/${path}`, receipt, body));
  }

  /** Get a message of `phase`, once the round has reached it. */
  get<T>(phase: Phase, path: string, decoder: Decoder<T>): Promise<T> {
    return this.ask(phase, () => this.session.call("GET", `${this.url}/${path}`, decoder));
  }

  /** What `call` gets from the server, once the round has reached `phase`. */
  protected async ask<T>(phase: Phase, call: () => Promise<T>): Promise<T> {
    for (;;) {
      const status = await this.reach(phase);
      try {
        return await this.send(call);
      } catch (error) {
        // Two web processes may answer the two requests, and the second may not know of the new phase yet.
        if (!(error instanceof TooEarlyError)) throw error;
        await this.wait(status.retry_after);
      }
    }
  }

  /** Poll until the round is in `phase` or later. Raises RoundAbandonedError when it failed before that. */
  async reach(phase: Phase): Promise<RoundStatus> {
    for (;;) {
      const status = await this.status();
      // A failure is a result for `result`; for every other phase it means that the phase never comes.
      if (status.phase === "failed" && phase !== "committed") {
        throw new RoundAbandonedError(`round ${this.plan.round_id} failed: ${status.reason}`);
      }
      // "Or later": a phase may pass between two polls.
      if (isReached(status, phase)) return status;
      await this.wait(status.retry_after);
    }
  }

  async result(): Promise<Ended> {
    const { phase, reason } = await this.reach("committed");
    return { counted: phase === "committed", reason };
  }

  async status(): Promise<RoundStatus> {
    try {
      return await this.patiently(() => this.session.call("GET", this.url, roundStatus));
    } catch (error) {
      throw error instanceof RefusedError ? this.abandoned(error) : error;
    }
  }

  /** Send a message of `phase`, the same bytes each time, until the server has it. */
  protected async deliver(phase: Phase, call: () => Promise<unknown>): Promise<void> {
    for (;;) {
      await this.owner.check();
      try {
        await this.send(call);
        return;
      } catch (error) {
        if (!(error instanceof TooEarlyError)) throw error;
        // 409 means too early, or that another message of this device is stored; the round's phase tells which.
        if (isReached(await this.status(), phase)) throw new RoundAbandonedError(error.message);
      }
      await this.reach(phase);
    }
  }

  /** Call, with an error for each refusal that has a next step of its own. */
  private async send<T>(call: () => Promise<T>): Promise<T> {
    try {
      return await this.patiently(call);
    } catch (error) {
      if (!(error instanceof RefusedError)) throw error;
      const text = `round ${this.plan.round_id}: ${error.message}`;
      if (error.status === 410) throw new GoneError(text);
      if (error.status === 409) throw new TooEarlyError(text);
      throw this.abandoned(error);
    }
  }

  private hear(): void {
    this.lastAnswer = performance.now();
  }

  /** Call until there is an answer, or until the server has been silent for `patience` seconds. */
  private async patiently<T>(call: () => Promise<T>): Promise<T> {
    for (let failures = 1; ; failures++) {
      let asked: number | null = null;
      const heard = this.lastAnswer;
      try {
        const answer = await call();
        this.hear();
        return answer;
      } catch (error) {
        const refused = error instanceof RefusedError;
        if (!refused && !(error instanceof UnreachableError)) throw error;
        if (refused && !isLater(error.status)) {
          // A refusal is an answer, so the silence is over.
          this.hear();
          throw error;
        }
        // Something arrived on the way, so the link carries: the waits begin anew.
        if (this.lastAnswer !== heard) failures = 1;
        if (performance.now() - this.lastAnswer > 1000 * this.config.patience) {
          throw new SilentError(this.abandoned(error).message);
        }
        asked = refused ? error.retryAfter : null;
      }
      // Twice `backoff`: the transport has used waits of `backoff` already, in its own attempts.
      await this.wait(waitAfter(failures, 2 * this.config.backoff, this.config.maxWait, asked));
    }
  }

  private async wait(seconds: number): Promise<void> {
    if (performance.now() - this.started > 1000 * this.config.roundTimeout) {
      throw new RoundAbandonedError(
        `round ${this.plan.round_id}: not over after ${this.config.roundTimeout} s (setting roundTimeout)`,
      );
    }
    await this.owner.check();
    // At least the shortest wait: with a `retry_after` of 0 the device would ask without a pause.
    await this.owner.pause(jittered(Math.min(Math.max(seconds, SHORTEST_WAIT), this.config.maxWait)));
  }

  private abandoned(error: Error): RoundAbandonedError {
    return new RoundAbandonedError(`round ${this.plan.round_id}: ${error.message}`);
  }
}

function isReached(status: RoundStatus, phase: Phase): boolean {
  return PHASES.indexOf(status.phase) >= PHASES.indexOf(phase);
}
