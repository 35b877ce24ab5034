/** What all members of a round over neighbours agree on (archipel/protocol: secagg_plus/terms.py, policy.py). */

import type { PrivacyPolicy } from "../../bundle/manifest.js";
import type { RoundPlan } from "../messages/rounds.js";
import type { Session } from "./session.js";
import type { Assumptions, Sizes } from "./sizes.js";

/** Those of a plan. */
export interface Terms {
  readonly session: Session;
  readonly sizes: Sizes;
  /** What the device insists on that the sizes withstand. */
  readonly assumed: Assumptions;
  readonly minCohort: number;
  readonly maxCohort: number;
  /** Masked entries are modulo 2^modulusBits. */
  readonly modulusBits: number;
}

/** The terms of a plan that was checked against the policy; `digest` is the plan's. */
export function termsOf(plan: RoundPlan, digest: string, policy: PrivacyPolicy): Terms {
  return {
    session: { roundId: plan.round_id, plan: digest },
    sizes: sizesOf(plan),
    assumed: assumptionsOf(policy),
    minCohort: leastCohort(plan),
    maxCohort: plan.max_cohort,
    modulusBits: plan.modulus_bits,
  };
}

export function sizesOf({ neighbours, threshold, partners }: RoundPlan): Sizes {
  return { neighbours, threshold, partners };
}

/** With how few devices a round over neighbours can begin: each needs `threshold` others. */
export function leastCohort(plan: RoundPlan): number {
  return Math.max(plan.min_cohort, plan.threshold + 1);
}

/** What a round over neighbours must withstand by the policy. */
export function assumptionsOf({ colluders, dropouts, server, min_cohort: least }: PrivacyPolicy): Assumptions {
  // With the device's own, `min_cohort` vectors hide each other, whatever the server does.
  return { corrupt: colluders, dropped: dropouts, server, hidden: Math.max(least - 1, 2), security: 40 };
}

/** How many devices have to sign that they were in a secure round before others believe that it took place. */
export function endorsersNeeded(plan: RoundPlan): number {
  // Of a complete graph more than half of all and of the colluders have to agree anyway. A threshold of neighbours may
  // be lower than the number of colluders, who could sign for rounds that never were.
  return plan.protocol === "complete" ? plan.threshold : Math.max(plan.threshold, plan.colluders + 1);
}
