/** What a device tells the page that embeds it (archipel/client/events.py). */

export type EventName =
  | "enrolled" | "waiting" | "paused" | "resumed" | "assigned" | "trained" | "advertised" | "shared" | "masked"
  | "uploaded" | "confirmed" | "unmasked" | "committed" | "dropped" | "refused" | "set_aside" | "erased"
  | "offered" | "adopted" | "kept" | "rotated";

export type Detail = Readonly<Record<string, string | number>>;

/** Something that happened. Bytes are of bodies in this round so far. */
export interface DeviceEvent {
  readonly name: EventName;
  readonly deviceId: string;
  readonly roundId: string;
  readonly bytesSent: number;
  readonly bytesReceived: number;
  /** Depends on the name: `examples`, `steps`, `loss` and `seconds` of "trained", the `reason` of "refused", ... */
  readonly detail: Detail;
}

export type Report = (name: EventName, detail: Detail, roundId?: string) => void;

/**
 * What one `runOnce` did: "waiting" (no round for this device now), "paused" (the owner's conditions do not hold),
 * "took_part" (the round was committed with this device's update), "dropped" or "refused".
 */
export interface Outcome {
  readonly kind: "waiting" | "paused" | "took_part" | "dropped" | "refused";
  /** After how many seconds to call again. */
  readonly wait: number;
  readonly roundId: string;
  readonly reason: string;
  readonly examples: number;
  readonly bytesSent: number;
  readonly bytesReceived: number;
}

export function outcome(kind: Outcome["kind"], wait: number, rest: Partial<Outcome> = {}): Outcome {
  return { kind, wait, roundId: "", reason: "", examples: 0, bytesSent: 0, bytesReceived: 0, ...rest };
}
