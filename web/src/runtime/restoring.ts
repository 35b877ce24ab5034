/** What a slot brings to a runtime: all of it on the bundle that it was learned on, what fits on a newer version. */

import type { NdArray } from "../arrays.js";
import type { Bundle } from "../bundle/reader.js";
import { NoStorageError } from "../errors.js";
import { findEarlier, readSlot } from "../storage/slots.js";
import { splitNames } from "./device_state.js";
import { fits } from "./values.js";

/** Which part of what was learned on an earlier version of the model goes on with a new one. */
export type Carry = "all" | "personal" | "nothing";

/** What a slot has brought: tensors by `parameter/NAME`, `personal/NAME`, `state/NAME`. */
export interface Restored {
  /** The digest of the bundle that it was learned on; another than the runtime's where it was carried over. */
  readonly digest: string;
  readonly moved: readonly string[];
  /** What does not fit the new version, or was not to be carried over. It stays in the old version's slot. */
  readonly left: readonly string[];
}

/** The tensors to take and what to say about them; null where nothing was saved. */
export interface Found {
  readonly groups: Record<"parameter" | "personal" | "state", Map<string, NdArray>>;
  readonly restored: Restored;
}

/** Raises StorageError for a damaged slot, TensorLayoutError; NoStorageError where the browser keeps nothing. */
export async function findLearned(
  bundle: Bundle,
  slot: string,
  carry: Carry,
  publishers: readonly string[],
): Promise<Found | null> {
  const own = await readSlot(bundle.digest, slot);
  if (own !== null) {
    const restored = { digest: bundle.digest, moved: [...own.keys()], left: [] };
    return { groups: splitNames(own, ["parameter", "personal", "state"]), restored };
  }
  if (carry === "nothing") return null;
  const earlier = await findEarlier(bundle.digest, slot, bundle.manifest.name, publishers);
  const learned = earlier === null ? null : await readSlot(earlier.digest, slot);
  if (earlier === null || learned === null) return null;
  const places = placesOf(bundle);
  const suits = ([key, array]: [string, NdArray]): boolean => {
    const place = places.get(key);
    return place !== undefined && fits(place, array);
  };
  const parameters = [...learned].filter(([key]) => key.startsWith("parameter/"));
  // Weights of one network go together: where one of them has no place, the new version's own are better.
  const whole = carry === "all" && parameters.every(suits);
  const taken = new Map([...learned].filter((each) => (each[0].startsWith("parameter/") ? whole : suits(each))));
  const restored = {
    digest: earlier.digest,
    moved: [...taken.keys()],
    left: [...learned.keys()].filter((key) => !taken.has(key)),
  };
  return { groups: splitNames(taken, ["parameter", "personal", "state"]), restored };
}

/** The message of a NoStorageError; raises every other error. */
export function storageProblem(error: unknown): string {
  if (error instanceof NoStorageError) return error.message;
  throw error;
}

/** Every tensor that a bundle's programs let a device keep, and its parameters, by the names of a slot's tensors. */
export function placesOf(bundle: Bundle): Map<string, Parameters<typeof fits>[0]> {
  const places = new Map<string, Parameters<typeof fits>[0]>();
  for (const program of Object.values(bundle.manifest.programs)) {
    for (const port of [...program.inputs, ...program.outputs]) {
      if (port.role === "personal") places.set(`personal/${port.tensor}`, port);
      if (port.role === "state" && port.lifetime === "device") places.set(`state/${port.tensor}`, port);
    }
  }
  for (const spec of bundle.manifest.parameters) places.set(`parameter/${spec.name}`, spec);
  return places;
}
