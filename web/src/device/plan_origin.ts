/**
 * Where a plan comes from in a tree of servers: every plan below the root's carries the root's own, as it was sealed
 * (archipel/protocol/origin.py).
 *
 * A device at an edge server has the root's key from its enrolment token. So the edge cannot give out a round of its
 * own for one of the root's, nor change what is trained, and a device recognises a round of the root that it has been
 * in.
 */

import type { Manifest } from "../bundle/manifest.js";
import { PolicyError } from "./errors.js";
import type { Root } from "./messages/identity.js";
import { type RoundPlan, roundPlan } from "./messages/rounds.js";
import { unseal } from "./sealed.js";

/** The fields in which a plan says the same as the root's: all that say what devices do, and not with whom. */
const SAME = [
  "task_id", "number", "bundle", "weights", "broadcast", "hyperparameters", "kind", "program", "narrow", "server_noise",
  "metrics", "distributions", "max_examples", "min_contributors", "count_adoption",
] as const satisfies readonly (keyof RoundPlan)[];

/**
 * The root's plan, of which `plan` is a part; null for a plan of a server's own.
 *
 * `root` is the one that the device pinned when it enrolled (null: its server is the root). Raises PolicyError for a
 * plan that is no part of it, for a training that is a server's own where the bundle is trained by a tree, and for one
 * whose members are edge servers; CertificateError or MessageError where the root did not seal the origin.
 */
export async function checkPlanOrigin(
  plan: RoundPlan,
  manifest: Manifest,
  root: Root | null,
): Promise<RoundPlan | null> {
  const refuse = (why: string): never => {
    throw new PolicyError(`plan ${plan.round_id}: ${why}`);
  };
  if (plan.levels) refuse(`with ${plan.levels} levels of edge servers, and this is a device`);
  if (plan.origin === null) {
    if (root !== null && plan.kind === "training" && manifest.privacy.aggregators !== null) {
      refuse(
        `a training of the server's own; the root alone has bundle ${manifest.name} trained, and its plan is not there`,
      );
    }
    return null;
  }
  if (root === null) return refuse("it names a root server, and this device was enrolled with none");
  const first = await unseal("plan", plan.origin, root.server_key, roundPlan);
  for (const name of SAME) {
    if (!same(first[name], plan[name])) refuse(`its ${name} is not that of the root's plan ${first.round_id}`);
  }
  if (!(first.levels > plan.levels)) {
    refuse(`with ${plan.levels} levels of edge servers, where the root's has ${first.levels}`);
  }
  if (plan.not_after > first.not_after) refuse(`it is good for longer than the root's, ${first.not_after}`);
  return first;
}

/** Whether two decoded values are equal; of objects the order of the keys says nothing. */
function same(one: unknown, other: unknown): boolean {
  if (typeof one !== "object" || typeof other !== "object" || one === null || other === null) return one === other;
  const [first, second] = [Object.entries(one), new Map(Object.entries(other))];
  return first.length === second.size && first.every(([key, value]) => second.has(key) && same(value, second.get(key)));
}
