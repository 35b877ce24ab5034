/** What a device keeps for itself of a model; all of its versions share it. */

import type { Bundle } from "../bundle/reader.js";
import { readWeights } from "../bundle/weights.js";
import { splitNames } from "../runtime/device_state.js";
import { placesOf } from "../runtime/restoring.js";
import type { RuntimeCore } from "../runtime/runtime.js";
import { fits } from "../runtime/values.js";
import type { Device } from "./device.js";
import { statePlace } from "./storage/journal.js";
import type { SealedBytes } from "./storage/vault.js";

/**
 * Give the runtime, before it is used, the personal tensors and the state that rounds with the model have left. Where
 * a version has another shape for one of them, or none, it begins with its own.
 */
export async function takeOwnState(runtime: RuntimeCore, bundle: Bundle, device: Device): Promise<void> {
  const place = statePlace(bundle.manifest.name);
  const sealed = await device.database.get<SealedBytes>("sealed", place);
  if (sealed === undefined) return;
  const places = placesOf(bundle);
  const kept = [...readWeights(await device.vault.open(place, sealed))].filter(([key, array]) => {
    const port = places.get(key);
    return port !== undefined && fits(port, array);
  });
  const groups = splitNames(new Map(kept), ["personal", "state"]);
  for (const [name, array] of groups.personal) runtime.device.personal.set(name, array);
  for (const [name, array] of groups.state) runtime.device.state.set(name, array);
}
