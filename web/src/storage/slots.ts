/** What was learned on top of a bundle, by the bundle's digest and a name of the caller's choice. */

import type { NdArray } from "../arrays.js";
import { readWeights, writeWeights } from "../bundle/weights.js";
import { RuntimeInputError } from "../errors.js";
import { readEntry, writeEntry } from "./database.js";

/** The tensors `parameter/NAME`, `personal/NAME`, `state/NAME` that were saved, null if there are none. */
export async function readSlot(digest: string, slot: string): Promise<Map<string, NdArray> | null> {
  const data = await readEntry("slots", keyOf(digest, slot));
  return data === null ? null : readWeights(data);
}

export async function writeSlot(digest: string, slot: string, tensors: ReadonlyMap<string, NdArray>): Promise<void> {
  await writeEntry("slots", keyOf(digest, slot), writeWeights(tensors));
}

function keyOf(digest: string, slot: string): string {
  if (typeof slot !== "string" || slot === "") throw new RuntimeInputError("slot: expected a name that is not empty");
  return `${digest}/${slot}`;
}
