/** The plans that this device has taken, so that it takes none twice (archipel/client/memory/plan_book.py). */

import type { RoundPlan } from "../messages/rounds.js";

const KEPT_TASKS = 256;
const RECENT = 8;
/** Seconds by which the device's own clock may be ahead of the server's. */
const CLOCK_SLACK = 86400;

interface TaskPlans {
  /** Of the task's last plans, ascending. */
  readonly serials: readonly number[];
  /** Until when (Unix seconds) any of its plans is valid. */
  readonly notAfter: number;
}

export interface Plans {
  readonly tasks: Readonly<Record<string, TaskPlans>>;
  /** Until when the plans of tasks that it does not have any more were valid. */
  readonly forgotten: number;
}

export const NO_PLANS: Plans = { tasks: {}, forgotten: 0 };

/** Why the plan is an old one, sent again; empty if it is new. */
export function whyOld(plans: Plans, plan: RoundPlan): string {
  const seen = plans.tasks[plan.task_id];
  if (seen === undefined) {
    if (plan.not_after > plans.forgotten) return "";
    return `its task is not known, and plans up to ${plans.forgotten} (Unix seconds) were taken before`;
  }
  const newest = seen.serials.at(-1) ?? -1;
  // Asynchronous rounds overlap, so their plans come out of order: the book knows the last RECENT serials exactly, and
  // refuses all below them. While it has fewer, it has forgotten none, so nothing is below.
  const overlapping = plan.buffered || plan.staleness_exponent !== null;
  const oldest = seen.serials.length === RECENT ? (seen.serials[0] as number) : -1;
  const lowest = overlapping ? oldest : newest;
  if (!seen.serials.includes(plan.serial) && plan.serial > lowest) return "";
  return `its serial is ${plan.serial}, this device has had ${newest} of its task`;
}

/** The plans with one more. */
export function takePlan(plans: Plans, plan: RoundPlan): Plans {
  const seen = plans.tasks[plan.task_id];
  const serials = [...new Set([plan.serial, ...(seen?.serials ?? [])])].sort((a, b) => a - b).slice(-RECENT);
  const notAfter = Math.max(plan.not_after, seen?.notAfter ?? 0);
  const tasks: Record<string, TaskPlans> = { ...plans.tasks, [plan.task_id]: { serials, notAfter } };
  let { forgotten } = plans;
  while (Object.keys(tasks).length > KEPT_TASKS) {
    // Forget the task whose plans expire first, so that `forgotten` stays as low as it can.
    const others = Object.entries(tasks).filter(([task]) => task !== plan.task_id);
    const [oldest, its] = others.reduce((least, each) => (each[1].notAfter < least[1].notAfter ? each : least));
    forgotten = Math.max(forgotten, its.notAfter);
    delete tasks[oldest];
  }
  return { tasks, forgotten };
}

/** Why the plan is no longer valid, by the clock of the server (null: unknown) or the own one; empty if it is. */
export function whyExpired(plan: RoundPlan, own: number, server: number | null): string {
  const until = `it was good until ${plan.not_after} (Unix seconds)`;
  if (server !== null && server > plan.not_after) return `${until}, at the server it is ${Math.floor(server)}`;
  if (own <= plan.not_after + CLOCK_SLACK) return "";
  return `${until}, here it is ${Math.floor(own)}; is this device's clock right?`;
}
