/** Checks that a round's plan is within the privacy policy that the publisher signed (archipel/protocol/policy.py). */

import type { Manifest, PrivacyPolicy } from "../bundle/manifest.js";
import { PolicyError } from "./errors.js";
import type { RoundPlan } from "./messages/rounds.js";
import { checkSizes } from "./secagg_plus/sizes.js";
import { assumptionsOf, leastCohort, sizesOf } from "./secagg_plus/terms.js";
import { colludersOf, fractionOf, splits } from "./thresholds.js";
import { groups, normBound } from "./updates/bounds.js";
import type { Layout } from "./updates/layout.js";

/**
 * Raises PolicyError unless devices of the population may use the bundle in rounds now (Unix seconds). `least` is the
 * greatest sequence that the caller has seen of the bundle's publisher and name.
 */
export function checkValidity(manifest: Manifest, population: string, now: number, least: number): void {
  const what = `bundle ${manifest.name}`;
  if (manifest.populations.length && !manifest.populations.includes(population)) {
    const made = manifest.populations.join(", ");
    throw new PolicyError(`${what}: its publisher made it for ${made}, not for ${population}`);
  }
  if (manifest.not_after && now > manifest.not_after) {
    throw new PolicyError(`${what}: it expired at ${manifest.not_after} (Unix seconds); have a new one signed`);
  }
  if (manifest.sequence < least) {
    const { sequence } = manifest;
    throw new PolicyError(`${what}: its sequence is ${sequence}, its publisher replaced what is below ${least}`);
  }
}

/**
 * The policy of rounds with so many levels of edge servers below: with some, its part `aggregators` for the sites.
 * Raises PolicyError where the policy has no such part, or allows fewer levels.
 */
function policyOfMembers(policy: PrivacyPolicy, levels: number): PrivacyPolicy {
  if (!levels) return policy;
  const sites = policy.aggregators ?? refuse("it allows no rounds among edge servers (aggregators)");
  if (levels > sites.levels) {
    refuse(`${levels} levels of edge servers, the policy allows ${sites.levels} (aggregators.levels)`);
  }
  const { min_cohort, threshold, colluders } = sites;
  // Few sites are a complete graph.
  return { ...policy, min_cohort, threshold, colluders, protocols: ["complete"] };
}

/** Raises PolicyError, which names the bound, unless `plan`, a training, keeps to `whole` for these updates. */
export function checkPlan(plan: RoundPlan, whole: PrivacyPolicy, layout: Layout): void {
  checkTree(plan, whole);
  const policy = policyOfMembers(whole, plan.levels);
  if (!policy.modes.includes(plan.privacy)) {
    refuse(`mode ${plan.privacy} is not among the allowed ${policy.modes.join(", ")}`);
  }
  if (plan.count_adoption || Object.keys(plan.distributions).length) {
    refuse(`adoption and distributions are told by evaluations only, this is a round of kind ${plan.kind}`);
  }
  // Exactly the policy's number: with a smaller one the checks below would ask for fewer devices.
  const colluders = plan.privacy === "secure" ? colludersOf(policy.colluders, plan.max_cohort) : 0;
  if (plan.colluders !== colluders) {
    refuse(`colluders ${plan.colluders} of max_cohort ${plan.max_cohort}: the policy withstands ${colluders}`);
  }
  // The colluders hide nobody, so they do not count.
  for (const [whose, floor] of [
    ["the policy's", policy.min_cohort],
    // Contributors are devices, where the members may be edge servers: each of these counts those of its own.
    ["the plan's min_contributors", plan.levels ? 0 : plan.min_contributors],
  ] as const) {
    if (plan.min_cohort - plan.colluders < floor) {
      refuse(`min_cohort ${plan.min_cohort}, less ${plan.colluders} that may collude, is below ${whose} ${floor}`);
    }
  }
  if (plan.max_cohort < Math.max(plan.min_cohort, plan.threshold)) {
    refuse(`max_cohort ${plan.max_cohort} is below min_cohort ${plan.min_cohort} or threshold ${plan.threshold}`);
  }
  if (plan.privacy === "secure" && !policy.protocols.includes(plan.protocol)) {
    refuse(`protocol ${plan.protocol} is not among the allowed ${policy.protocols.join(", ")}`);
  }
  if (plan.protocol === "neighbours-mlkem") {
    refuse("its rounds need ML-KEM, which this device has not");
  }
  if (plan.protocol === "neighbours") {
    checkNeighbours(plan, policy);
  } else if (plan.neighbours || plan.partners) {
    refuse(`neighbours ${plan.neighbours} and partners ${plan.partners} in a round over the complete graph`);
  } else if (plan.privacy === "secure") {
    checkThreshold(plan, policy);
  }
  if (plan.noise || policy.noise_multiplier > 0) {
    refuse("devices add noise to their updates themselves in its rounds, which this device cannot do");
  }
  checkUpdates(plan, policy, layout);
  // A sum that overflows would be decoded to other numbers, without an error.
  if (!layout.fits(plan.modulus_bits, plan.max_cohort * plan.site)) {
    const below = plan.levels ? ` of up to ${plan.site} devices` : "";
    refuse(`a modulus of ${plan.modulus_bits} bits can overflow with max_cohort ${plan.max_cohort}${below}`);
  }
}

/** What a plan says of edge servers, and the site that it is the round of. */
function checkTree(plan: RoundPlan, policy: PrivacyPolicy): void {
  if (!plan.levels && plan.site !== 1) refuse(`site ${plan.site} in a round of devices`);
  if (!plan.levels && plan.origin === null) return;
  const sites = policy.aggregators ?? refuse("it allows no rounds among edge servers (aggregators)");
  if (plan.privacy !== "secure" || plan.buffered || plan.staleness_exponent !== null) {
    refuse("rounds below or among edge servers are secure, and not asynchronous");
  }
  if (plan.count_adoption) {
    refuse("adoption is counted at each edge server, whose devices were offered versions by it");
  }
  const { min_site_cohort: least, max_site_cohort: most } = sites;
  if (plan.levels && !(least <= plan.site && plan.site <= most)) {
    refuse(
      `sites of up to ${plan.site} devices, the policy has them from ${least} to ${most} ` +
        "(aggregators.min_site_cohort, max_site_cohort)",
    );
  }
  if (plan.levels && plan.site < plan.min_contributors) {
    refuse(`sites of up to ${plan.site} devices, and min_contributors ${plan.min_contributors} holds for each site`);
  }
  if (plan.origin === null) return;
  // Each site below has as many as this at least.
  if (!plan.levels && plan.min_cohort - plan.colluders < least) {
    refuse(
      `min_cohort ${plan.min_cohort}, less ${plan.colluders} that may collude, is below ${least}, the smallest site ` +
        "(aggregators.min_site_cohort)",
    );
  }
  if (plan.max_cohort * plan.site > most) {
    refuse(
      `up to ${plan.max_cohort * plan.site} devices in the sum of a site, the policy allows ${most} ` +
        "(aggregators.max_site_cohort)",
    );
  }
}

function checkThreshold(plan: RoundPlan, policy: PrivacyPolicy): void {
  // Exact: 0.56 is meant as 56/100, and 0.56 * 25 in floating point is above 14.
  const { numerator, denominator } = fractionOf(policy.threshold);
  if (BigInt(plan.threshold) * denominator < numerator * BigInt(plan.max_cohort)) {
    refuse(
      `threshold ${plan.threshold} of max_cohort ${plan.max_cohort} is below the policy's ratio ${policy.threshold}`,
    );
  }
  if (splits(plan.threshold, plan.max_cohort, plan.colluders)) {
    refuse(
      `threshold ${plan.threshold} is not more than half of max_cohort ${plan.max_cohort} and ${plan.colluders} ` +
        "colluders together; a server with so many could have two groups each unmask something else",
    );
  }
}

function checkNeighbours(plan: RoundPlan, policy: PrivacyPolicy): void {
  if (plan.privacy !== "secure" || plan.kind !== "training") {
    refuse(`protocol neighbours is for secure trainings, this is a round of kind ${plan.kind}, ${plan.privacy}`);
  }
  // With the cohort as it comes a device checks this once more, before it shares a secret.
  for (const cohort of [leastCohort(plan), plan.max_cohort]) checkSizes(sizesOf(plan), cohort, assumptionsOf(policy));
}

function checkUpdates(plan: RoundPlan, policy: PrivacyPolicy, layout: Layout): void {
  for (const port of layout.updates) {
    const here = `update '${port.name}'`;
    if (port.bits > policy.max_bits) refuse(`${here} has ${port.bits} bits, the policy allows ${policy.max_bits}`);
    if (port.kind === "delta" && (port.clip === null || port.clip > policy.max_clip)) {
      const clip = port.clip === null ? "is not clipped" : `is clipped to ${port.clip}`;
      refuse(`${here} ${clip}, the policy allows a norm of ${policy.max_clip}`);
    }
    if (policy.weighting === "uniform" && (port.kind === "weight" || port.weighting !== "uniform")) {
      refuse(`${here} is weighted by ${port.weighting}, the policy wants every device to weigh 1`);
    }
    if (plan.privacy === "secure" && port.carries?.method === "largest") {
      refuse(`${here} has elements of each device's own choice, whose masks do not cancel`);
    }
  }
  for (const group of groups(layout.updates)) {
    const [first] = group.ports;
    if (first?.kind !== "delta" && !(normBound(group) <= policy.max_value)) {
      refuse(`${group.name} may have a norm of ${normBound(group)}, the policy allows ${policy.max_value} (max_value)`);
    }
  }
}

function refuse(why: string): never {
  throw new PolicyError(`the plan is outside the bundle's privacy policy: ${why}`);
}
