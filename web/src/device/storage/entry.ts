/** The journal's entry of one round, and the sums over all rounds (archipel/client/memory/entry.py, spending.py). */

export type Step =
  | "assigned" | "advertising" | "sharing" | "complaining" | "masked" | "confirming" | "unmasking" | "closed";
export type Result = "" | "took_part" | "dropped" | "refused";

/** What this device did in one round. Times are Unix seconds, sizes bytes of bodies. */
export interface Entry {
  readonly roundId: string;
  readonly taskId: string;
  readonly number: number;
  /** SHA-256 of the plan and of the bundle's manifest. */
  readonly plan: string;
  readonly bundle: string;
  /** The round of the root server that this round is a part of, in a tree of servers. */
  readonly origin?: string;
  /** The bundle's name; empty before it was fetched. */
  readonly model: string;
  /** The last step that has begun. */
  readonly step: Step;
  readonly started: number;
  readonly changed: number;
  /** SHA-256 of the masked update; null: there was none to send yet. */
  readonly masked: string | null;
  readonly result: Result;
  readonly reason: string;
  readonly examples: number;
  readonly steps: number;
  /** How many devices' updates are in the sum; 0: the device was not told. */
  readonly cohort: number;
  /** Whether this device added noise for differential privacy, and what that costs one example (0: not stated). */
  readonly noise: "unknown" | "none" | "added";
  readonly rho: number;
  readonly sent: number;
  readonly received: number;
  /** Whether all that the round needs is kept beside the entry, so that it goes on after a reload. */
  readonly resumes: boolean;
}

/** Numbers over all rounds of this device, also those whose entries were removed. */
export interface Totals {
  readonly rounds: number;
  readonly tookPart: number;
  readonly dropped: number;
  readonly refused: number;
  readonly open: number;
  readonly sent: number;
  readonly received: number;
  /** Secure rounds that the device left after it sent its masked update, which is in a sum or lost. */
  readonly unsure: number;
  /** The fewest devices in one of the sums with this device's update; 0: there was none. */
  readonly smallest: number;
  /** Rounds with noise whose strength the bundle states, and the sum of their rhos. */
  readonly noised: number;
  readonly rho: number;
}

export const NO_ROUNDS: Totals = {
  rounds: 0, tookPart: 0, dropped: 0, refused: 0, open: 0, sent: 0, received: 0, unsure: 0, smallest: 0, noised: 0,
  rho: 0,
};

/** The totals with one more round. */
export function plus(totals: Totals, entry: Entry): Totals {
  const is = (result: Result): number => Number(entry.step === "closed" && entry.result === result);
  // Rounds in which nothing was sent cost nothing; a stored update may have been sent, whatever the result.
  const released = entry.result === "took_part" || entry.masked !== null;
  const stated = released && entry.noise === "added" && entry.rho > 0;
  const told = entry.result === "took_part" ? entry.cohort : 0;
  return {
    rounds: totals.rounds + 1,
    tookPart: totals.tookPart + is("took_part"),
    dropped: totals.dropped + is("dropped"),
    refused: totals.refused + is("refused"),
    open: totals.open + Number(entry.step !== "closed"),
    sent: totals.sent + entry.sent,
    received: totals.received + entry.received,
    unsure: totals.unsure + Number(released && entry.result !== "took_part"),
    smallest: Math.min(...[totals.smallest, told].filter((devices) => devices > 0), Number.MAX_SAFE_INTEGER) %
      Number.MAX_SAFE_INTEGER,
    noised: totals.noised + Number(stated),
    rho: totals.rho + (stated ? entry.rho : 0),
  };
}
