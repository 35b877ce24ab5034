/**
 * The two slots of a model: the version that runs, and the one before it, to which the device returns when the newer
 * one fails (archipel/lite_runtime/slots/). The slots alone say which version runs.
 *
 * A version's files lie beside the cache, which never removes them; files and state change in one transaction.
 */

import type { Bytes } from "../bytes.js";
import type { Offer } from "../messages/offers.js";
import type { Change, DeviceDatabase } from "../storage/database.js";

/** So many starts of a version on trial may end before its first good answer. */
const ATTEMPTS = 3;
const MAX_REASON = 1000;
export const WITHDRAWN = "the server took it back";

export type SlotName = "a" | "b";

export interface Slot {
  /** "trying": on trial; "good": it has answered often enough, or is the one to return to; "bad": it failed. */
  readonly status: "empty" | "trying" | "good" | "bad";
  readonly version: number;
  /** Of the bundle, and of the weights that replace its own (empty: its own). */
  readonly digest: string;
  readonly weights: string;
  readonly attempts: number;
  readonly reason: string;
}

export interface SlotState {
  readonly active: SlotName | "";
  readonly a: Slot;
  readonly b: Slot;
}

/** What a slot runs; `weights` is null where the bundle's own are used. */
export interface SlotFiles {
  readonly bundle: Bytes;
  readonly weights: Bytes | null;
}

const EMPTY: Slot = { status: "empty", version: 0, digest: "", weights: "", attempts: 0, reason: "" };
const NO_SLOTS: SlotState = { active: "", a: EMPTY, b: EMPTY };

const PREFIX = "slots/";
const stateKey = (model: string): string => `${PREFIX}${model}`;
const filesKey = (model: string, name: SlotName): string => `slot/${model}/${name}`;

export function other(name: SlotName): SlotName {
  return name === "a" ? "b" : "a";
}

/** The slot whose version runs, or runs after the next start; empty if none does. */
export function runningName(state: SlotState): SlotName | "" {
  if (!state.active) return "";
  const { status, attempts } = state[state.active];
  if (status === "good" || attempts) return state.active;
  return state[other(state.active)].status === "good" ? other(state.active) : "";
}

export function runningSlot(state: SlotState): Slot | null {
  const name = runningName(state);
  return name ? state[name] : null;
}

/** Whether the slot has the offered version, in good order. */
export function holds(slot: Slot, offer: Offer): boolean {
  return slot.status === "good" && isOf(slot, offer);
}

/**
 * Whether the server takes back the running version: it offers to all devices an older version, or the one in the other
 * slot, which ran before.
 */
export function takesBack(offer: Offer, state: SlotState): boolean {
  const running = runningSlot(state);
  // The offer of a rollout is for some devices only, and takes nothing back.
  if (offer.rollout !== null || running === null) return false;
  return offer.version < running.version || holds(state.a, offer) || holds(state.b, offer);
}

/** Why the slots gave up the offered version after it was adopted; empty if they did not. */
export function whyGivenUp(state: SlotState, offer: Offer): string {
  for (const slot of [state.a, state.b]) {
    if (!isOf(slot, offer)) continue;
    // A version that the server took back has not failed on this device.
    if (slot.status === "bad" && slot.reason !== WITHDRAWN) return slot.reason || "it failed while it ran";
    if (slot.status === "trying" && !slot.attempts) return "it was started several times and never answered";
  }
  return "";
}

function isOf(slot: Slot, offer: Offer): boolean {
  return slot.version === offer.version && slot.digest === offer.bundle && slot.weights === (offer.weights ?? "");
}

export class ModelSlots {
  constructor(private readonly database: DeviceDatabase) {}

  async state(model: string): Promise<SlotState> {
    return (await this.database.get<SlotState>("books", stateKey(model))) ?? NO_SLOTS;
  }

  /** The number of the running version by model. */
  async versions(): Promise<Record<string, number>> {
    const keys = (await this.database.keys("books")).filter((key) => key.startsWith(PREFIX)).sort();
    const numbers: Record<string, number> = {};
    for (const model of keys.map((key) => key.slice(PREFIX.length))) {
      const slot = runningSlot(await this.state(model));
      if (slot !== null) numbers[model] = slot.version;
    }
    return numbers;
  }

  files(model: string, name: SlotName): Promise<SlotFiles | undefined> {
    return this.database.get<SlotFiles>("files", filesKey(model, name));
  }

  /** Put the version in the slot that does not run, and run it from now on, on trial. */
  async install(offer: Offer, files: SlotFiles): Promise<void> {
    const state = await this.state(offer.model);
    const running = runningName(state);
    const target = running ? other(running) : "a";
    const slot: Slot = {
      ...EMPTY, status: "trying", version: offer.version, digest: offer.bundle, weights: offer.weights ?? "",
      attempts: ATTEMPTS,
    };
    // The running version has had no error so far, so it is the one to return to.
    const rest: Slot = running ? { ...state[running], status: "good", attempts: 0 } : { ...state.b };
    await this.write(
      offer.model,
      { ...state, [other(target)]: rest, [target]: slot, active: target },
      { store: "files", key: filesKey(offer.model, target), value: files },
    );
  }

  /** Run the other slot's version, which is a good one; the one that ran is bad for `reason`. */
  async returnToOther(model: string, reason: string): Promise<void> {
    const state = await this.state(model);
    if (!state.active) return;
    const failed: Slot = { ...state[state.active], status: "bad", attempts: 0, reason: reason.slice(0, MAX_REASON) };
    await this.write(model, { ...state, [state.active]: failed, active: other(state.active) });
  }

  /** Change the number of starts that the version on trial has left. */
  async countStarts(model: string, change: 1 | -1): Promise<void> {
    const state = await this.state(model);
    if (!state.active || state[state.active].status !== "trying") return;
    const { attempts } = state[state.active];
    const slot = { ...state[state.active], attempts: Math.max(0, Math.min(ATTEMPTS, attempts + change)) };
    await this.write(model, { ...state, [state.active]: slot });
  }

  /** The trial is over: the version is good. */
  async confirm(model: string): Promise<void> {
    const state = await this.state(model);
    if (!state.active || state[state.active].status !== "trying") return;
    const slot: Slot = { ...state[state.active], status: "good", attempts: 0 };
    await this.write(model, { ...state, [state.active]: slot });
  }

  private write(model: string, state: SlotState, ...more: Change[]): Promise<void> {
    return this.database.write({ store: "books", key: stateKey(model), value: state }, ...more);
  }
}
