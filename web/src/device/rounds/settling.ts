/**
 * How this device ends rounds: at once, when their result is known, or after a reload
 * (archipel/client/rounds/settling.py).
 */

import { ArchipelError } from "../../errors.js";
import type { Device } from "../device.js";
import { RefusedError, RoundAbandonedError, SessionRefusedError, UnreachableError } from "../errors.js";
import { type Outcome, outcome } from "../events.js";
import { encode } from "../messages/fields.js";
import { type LeaveReason, receipt, type RoundStatus, roundStatus } from "../messages/rounds.js";
import type { OpenRound } from "../storage/journal.js";
import { type Ended, isLater } from "./exchange.js";
import type { DeviceSession } from "./session.js";
import { sendUpdate } from "./uploading.js";

/** Closes rounds in the journal, and keeps what the device learned in the ones that count. */
export class Settling {
  constructor(
    private readonly device: Device,
    private readonly session: DeviceSession,
  ) {}

  /**
   * Close the round in the journal. `reason` is for the owner; `why` is what the server may be told. `tell`: whether a
   * device that has sent keys says that it leaves, too.
   */
  async end(
    journal: OpenRound,
    kind: "took_part" | "dropped" | "refused",
    reason: string,
    wait: number,
    why: LeaveReason = "other",
    tell = true,
  ): Promise<Outcome> {
    const { roundId } = journal.entry;
    if (tell || !journal.keysSent) await this.leave(roundId, why);
    const { sent, received } = this.session.transport;
    await journal.close(kind, reason, sent, received);
    if (kind !== "took_part") {
      this.device.report(kind, kind === "refused" ? { reason, limit: why } : { reason }, roundId);
    }
    const { examples } = journal.entry;
    return outcome(kind, wait, { roundId, reason, examples, bytesSent: sent, bytesReceived: received });
  }

  /** Tell the server that the device leaves, so that the others go on at once. Errors are ignored. */
  async leave(roundId: string, why: LeaveReason): Promise<void> {
    try {
      const body = encode(this.device.config.tellWhy ? { reason: why } : {});
      await this.session.call("POST", `/v1/rounds/${roundId}/leave`, receipt, body);
    } catch (error) {
      // If the message is lost, the others wait until the phase's time is over.
      if (!(error instanceof ArchipelError)) throw error;
    }
  }

  /** Close a round whose result is known, and keep the device's new state if the round counts. */
  async conclude(journal: OpenRound, ended: Ended, wait: number): Promise<Outcome> {
    if (!ended.counted) return this.end(journal, "dropped", `the round failed: ${ended.reason}`, wait, "other", false);
    this.device.report("committed", {}, journal.entry.roundId);
    return this.end(journal, "took_part", "", wait, "other", false);
  }

  /** Ask the server for the result of a round that has this device's update; null if it is not known yet. */
  async settle(journal: OpenRound, wait: number): Promise<Outcome | null> {
    let status: RoundStatus;
    try {
      status = await this.session.call("GET", `/v1/rounds/${journal.entry.roundId}`, roundStatus);
    } catch (error) {
      if (error instanceof SessionRefusedError) throw error;
      if (error instanceof RefusedError) {
        return isLater(error.status) ? null : this.end(journal, "dropped", error.message, wait, "other", false);
      }
      if (error instanceof UnreachableError || error instanceof RoundAbandonedError) return null;
      throw error;
    }
    if (status.phase !== "committed" && status.phase !== "failed") return null;
    return this.conclude(journal, { counted: status.phase === "committed", reason: status.reason }, wait);
  }

  /**
   * End the rounds that a reload interrupted after keys were sent and that cannot be resumed: their secrets are gone.
   *
   * Gives the id of a round that has this device's update and no result yet, or an empty text. Until there is a result,
   * no other round may begin: it would train on a state that this result may replace.
   */
  async recover(): Promise<string> {
    let pending = "";
    for (const journal of await this.device.journal.unfinished()) {
      if (journal.counted) {
        // The server has counted this device, so its update may be in the sum: only the server knows.
        if ((await this.settle(journal, 0)) === null) pending = journal.entry.roundId;
      } else if (journal.keysSent) {
        await this.abandon(journal, "the page was closed or loaded again in the round", 0);
      }
    }
    return pending;
  }

  /** Leave a round with keys sent whose secrets are gone. Raises RefusedError if the server cannot answer now. */
  async abandon(journal: OpenRound, why: string, wait: number): Promise<Outcome> {
    const { roundId } = journal.entry;
    let reason = why;
    const stored = await journal.masked();
    if (stored === null) {
      await this.leave(roundId, "other");
    } else {
      // The peers' shares can still unmask these bytes. Other bytes under the same masks would reveal the difference of
      // the two updates, so a stored update is never computed again.
      try {
        await sendUpdate(this.session, roundId, stored.data, stored.digest);
        reason += "; the stored update was sent";
      } catch (error) {
        if (!(error instanceof RefusedError)) throw error;
        // The round stays open, and the next check-in sends the bytes again.
        if (isLater(error.status) || error instanceof SessionRefusedError) throw error;
        reason += `; the server refused the stored update (${error.message})`;
      }
    }
    await journal.close("dropped", reason, 0, 0);
    this.device.report("dropped", { reason }, roundId);
    return outcome("dropped", wait, { roundId, reason });
  }
}
