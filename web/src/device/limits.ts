/**
 * The owner's limits: which rounds the device takes part in. Each is checked as early as what it needs is known, and
 * all of them before any computation (archipel/client/conditions/owner_limits.py).
 */

import type { Manifest } from "../bundle/manifest.js";
import type { Config } from "./config.js";
import type { Enrolment } from "./enrolment.js";
import { OwnerRefusalError } from "./errors.js";
import type { LeaveReason, RoundPlan } from "./messages/rounds.js";
import { epsilonOf, noiseOf } from "./privacy.js";
import type { Journal } from "./storage/journal.js";
import type { Layout } from "./updates/layout.js";
import { maskedSize } from "./updates/packing.js";

export class OwnerLimits {
  constructor(
    private readonly config: Config,
    private readonly enrolment: Enrolment,
    private readonly journal: Journal,
  ) {}

  /** The plan, before anything is fetched. Raises OwnerRefusalError. */
  async checkPlan(plan: RoundPlan): Promise<void> {
    const { config } = this;
    const refuse = refusal(plan);
    const reason = whyNotPopulation(this.enrolment.population, config);
    if (reason) refuse("population", reason);
    if (!this.enrolment.publisherKeys.length) {
      refuse("publisher", "none of the publishers that this device pinned is among those that its owner allows");
    }
    if (plan.kind !== "training") {
      refuse("kind", `kind ${plan.kind}; devices in browsers take part in trainings only`);
    }
    if (plan.privacy !== "secure") {
      refuse("privacy", "a plain round; devices in browsers take part in secure ones only");
    }
    if (plan.broadcast !== null) {
      refuse("kind", "its strategy broadcasts more than weights, whose origin devices in browsers cannot check");
    }
    if (plan.min_cohort < config.minCohort) {
      refuse("cohort", `a cohort of ${plan.min_cohort} or more, its owner allows ${config.minCohort} (minCohort)`);
    }
    if (config.maxRoundsPerDay !== null) {
      const begun = await this.journal.begunToday(plan.round_id);
      if (begun >= config.maxRoundsPerDay) {
        refuse("pace", `${begun} rounds in the last day, its owner allows ${config.maxRoundsPerDay} (maxRoundsPerDay)`);
      }
    }
  }

  /** The signed manifest, before weights are fetched and graphs loaded. Raises OwnerRefusalError. */
  checkBundle(plan: RoundPlan, manifest: Manifest, layout: Layout): void {
    const { config } = this;
    const refuse = refusal(plan);
    const { peak_bytes: peak, upload_bytes: stated } = manifest.limits;
    if (peak > config.maxPeakBytes) {
      refuse("size", `up to ${peak} bytes of memory, its owner allows ${config.maxPeakBytes} (maxPeakBytes)`);
    }
    // The manifest may state more than the layout has; the owner's limit is for the larger of the two.
    const upload = Math.max(stated, maskedSize(layout, plan));
    if (upload > config.maxUploadBytes) {
      refuse("size", `up to ${upload} bytes of upload, its owner allows ${config.maxUploadBytes} (maxUploadBytes)`);
    }
    if (layout.length > config.maxUploadEntries) {
      const allowed = `its owner allows ${config.maxUploadEntries} (maxUploadEntries)`;
      refuse("size", `${layout.length} numbers to send, ${allowed}`);
    }
  }

  /** The number of local examples, before anything is computed on them. Raises OwnerRefusalError. */
  async checkExamples(plan: RoundPlan, manifest: Manifest, examples: number): Promise<void> {
    const most = this.config.maxEpsilon;
    if (most === null) return;
    const refuse = refusal(plan);
    const allowed = `its owner allows an epsilon of ${most} (maxEpsilon)`;
    const { noise, rho } = noiseOf(manifest, plan.program, examples);
    // Without stated noise no epsilon bounds the round, so any limit excludes it.
    if (noise !== "added" || rho <= 0) {
      refuse("privacy", `no noise whose strength the bundle states, ${allowed}`);
    }
    // rho adds up over rounds; epsilon follows from the sum.
    const spent = epsilonOf((await this.journal.totals(plan.round_id)).rho + rho);
    if (spent > most) {
      refuse("privacy", `epsilon ${spent.toPrecision(3)} with all rounds before, ${allowed}`);
    }
  }
}

/** Why the owner does not allow this population; empty if the owner does. */
export function whyNotPopulation(population: string, config: Config): string {
  if (!config.populations.length || config.populations.includes(population)) return "";
  return `population ${population}, its owner allows ${config.populations.join(", ")} (populations)`;
}

function refusal(plan: RoundPlan): (code: LeaveReason, why: string) => never {
  return (code, why) => {
    throw new OwnerRefusalError(`plan ${plan.round_id}: ${why}`, code);
  };
}
