/** What was learned on top of a bundle, by the bundle's digest and a name of the caller's choice. */

import type { NdArray } from "../arrays.js";
import { readWeights, writeWeights } from "../bundle/weights.js";
import { RuntimeInputError } from "../errors.js";
import { listEntries, readEntry, removeEntry, writeEntry } from "./database.js";

/** What a device has learned on top of one version of a model. */
export interface SavedSlot {
  /** The name that `save` was given. */
  readonly slot: string;
  /** The model's name, "" where an early version of this library has saved it. */
  readonly bundle: string;
  /** The digest of the bundle: the version that was learned on. */
  readonly digest: string;
  /** The public key that signed the bundle, in 64 hexadecimal digits; "" as for `bundle`. */
  readonly publisher: string;
  /** When, in milliseconds since 1970; 0 as for `bundle`. */
  readonly savedAt: number;
  readonly bytes: number;
}

type About = Pick<SavedSlot, "bundle" | "publisher" | "savedAt">;

/** All that is kept in this browser for the page's origin, newest first. Raises StorageError. */
export async function listSlots(): Promise<SavedSlot[]> {
  const entries = await listEntries("slots");
  const slots = entries.map(({ key, bytes, about }) => {
    const { bundle, publisher, savedAt } = (about ?? {}) as Partial<Record<keyof About, unknown>>;
    return {
      slot: key.slice(65),
      digest: key.slice(0, 64),
      bundle: typeof bundle === "string" ? bundle : "",
      publisher: typeof publisher === "string" ? publisher : "",
      savedAt: typeof savedAt === "number" && savedAt >= 0 ? savedAt : 0,
      bytes,
    };
  });
  return slots.sort((first, second) => second.savedAt - first.savedAt);
}

/**
 * What is kept as `slot`, as a safetensors file of tensors `parameter/NAME`, `personal/NAME`, `state/NAME`; of the
 * version with that digest, default: the newest. Raises RuntimeInputError if there is none, StorageError.
 */
export async function exportSlot(slot: string, digest?: string): Promise<Uint8Array> {
  const found = (await versionsOf(slot)).find((each) => digest === undefined || each.digest === digest);
  const data = found === undefined ? null : await readEntry("slots", keyOf(found.digest, slot));
  if (data === null) throw new RuntimeInputError(`slot '${slot}': nothing is kept under this name; see listSlots()`);
  return data;
}

/** Remove what is kept as `slot`, on all versions or on the one with that digest. Raises StorageError. */
export async function deleteSlot(slot: string, digest?: string): Promise<void> {
  for (const each of await versionsOf(slot)) {
    if (digest === undefined || each.digest === digest) await removeEntry("slots", keyOf(each.digest, slot));
  }
}

/** The tensors `parameter/NAME`, `personal/NAME`, `state/NAME` that were saved, null if there are none. */
export async function readSlot(digest: string, slot: string): Promise<Map<string, NdArray> | null> {
  const data = await readEntry("slots", keyOf(digest, slot));
  return data === null ? null : readWeights(data);
}

/** The newest of `slot` on another version of the model, signed by one of the keys (hexadecimal). */
export async function findEarlier(
  digest: string,
  slot: string,
  bundle: string,
  publishers: readonly string[],
): Promise<SavedSlot | null> {
  const versions = (await versionsOf(slot)).filter((each) => each.digest !== digest && each.bundle === bundle);
  return versions.find((each) => publishers.includes(each.publisher)) ?? null;
}

/** Keep the tensors; of what was learned on earlier versions of the model the newest stays, to return to. */
export async function writeSlot(
  digest: string,
  slot: string,
  about: Pick<About, "bundle" | "publisher">,
  tensors: ReadonlyMap<string, NdArray>,
): Promise<void> {
  const key = keyOf(digest, slot);
  const earlier = (await versionsOf(slot)).filter((each) => each.digest !== digest && each.bundle === about.bundle);
  const old = earlier.slice(1).map((each) => keyOf(each.digest, slot));
  await writeEntry("slots", key, writeWeights(tensors), { ...about, savedAt: Date.now() }, old);
}

async function versionsOf(slot: string): Promise<SavedSlot[]> {
  return (await listSlots()).filter((each) => each.slot === slot);
}

function keyOf(digest: string, slot: string): string {
  if (typeof slot !== "string" || slot === "") throw new RuntimeInputError("slot: expected a name that is not empty");
  return `${digest}/${slot}`;
}
