/** What a device keeps for itself between rounds: personal tensors, and state that lives as long as the device. */

import type { NdArray } from "../arrays.js";
import { TensorLayoutError } from "../errors.js";

/** Tensors by logical name. The arrays are replaced, never changed in place, so copied maps are a snapshot. */
export interface DeviceState {
  readonly personal: Map<string, NdArray>;
  readonly state: Map<string, NdArray>;
}

export type Groups = Readonly<Record<string, ReadonlyMap<string, NdArray>>>;

/** {group: {name: array}} -> {"group/name": array}. */
export function joinNames(groups: Groups): Map<string, NdArray> {
  return new Map(
    Object.entries(groups).flatMap(([group, arrays]) =>
      Array.from(arrays, ([name, array]): [string, NdArray] => [`${group}/${name}`, array]),
    ),
  );
}

/** Inverse of `joinNames`. Raises TensorLayoutError for a name in none of the groups. */
export function splitNames<const G extends string>(
  tensors: ReadonlyMap<string, NdArray>,
  groups: readonly G[],
): Record<G, Map<string, NdArray>> {
  const found = Object.fromEntries(groups.map((group) => [group, new Map()])) as Record<G, Map<string, NdArray>>;
  for (const [key, array] of tensors) {
    const at = key.indexOf("/");
    const group = groups.find((each) => each === key.slice(0, Math.max(0, at)));
    if (group === undefined) throw new TensorLayoutError(`tensor ${key} is in none of the groups ${groups.join(", ")}`);
    found[group].set(key.slice(at + 1), array);
  }
  return found;
}
