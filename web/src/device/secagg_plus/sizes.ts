/**
 * Whether the neighbours of a round are enough: for their number, the secrets' threshold and the masks
 * (archipel/protocol/secagg_plus/sizes.py, Bell et al. 2020).
 *
 * Of the few others that a device shares its secrets with, the corrupt ones must be too few to join their shares. How
 * many they are at most is the tail of a hypergeometric distribution, added up from its small end, with a union bound
 * over all devices. Only security is checked; whether enough devices stay is the server's concern.
 */

import { PolicyError } from "../errors.js";

export const MAX_DEVICES = 1 << 16;
/** Shares are meant as decimals: 0.2 of 1000 devices are 200, not 199.99999999999997. */
const SMALL = 1e-9;

/** What a round must withstand. */
export interface Assumptions {
  /** The share of the cohort that works with the server, from 0 to below 1. */
  readonly corrupt: number;
  /** The share that may leave before the end, from 0 to below 1. */
  readonly dropped: number;
  /** A semi-honest server keeps to the protocol and keeps what it sees; a malicious one does what it likes. */
  readonly server: "malicious" | "semi-honest";
  /** In how many other honest devices' sum a vector is at least hidden from a malicious server. */
  readonly hidden: number;
  /** The probability that some device is not protected is at most 2^-security. */
  readonly security: number;
}

/** Of every device in a cohort. */
export interface Sizes {
  /** How many others it draws, who each get a share of its two secrets. */
  readonly neighbours: number;
  /** How many of these shares give a secret. */
  readonly threshold: number;
  /** The first so many of the neighbours also share a mask with it. */
  readonly partners: number;
}

/** Raises PolicyError unless the sizes keep the secrets of a cohort of this size under what is assumed. */
export function checkSizes(sizes: Sizes, cohort: number, assumed: Assumptions): void {
  if (!(cohort >= 3 && cohort <= MAX_DEVICES)) {
    throw new PolicyError(`a cohort of ${cohort}: a secure round has from 3 to ${MAX_DEVICES} devices`);
  }
  const neighbours = Math.min(sizes.neighbours, cohort - 1);
  const shown = `${sizes.neighbours} neighbours, threshold ${sizes.threshold}, ${sizes.partners} partners`;
  const enough = sizes.threshold >= 1 && sizes.threshold <= neighbours;
  if (!enough || !(sizes.partners >= 1 && sizes.partners <= sizes.neighbours)) {
    throw new PolicyError(`${shown}, in a cohort of ${cohort}: the threshold or the partners exceed the neighbours`);
  }
  const low = lowestThreshold(cohort, neighbours, assumed);
  if (sizes.threshold < low) {
    throw new PolicyError(
      `threshold ${sizes.threshold} of ${neighbours} neighbours in a cohort of ${cohort} is below ${low}, which a ` +
        `${assumed.server} server with ${countOf(assumed.corrupt, cohort)} corrupt devices calls for`,
    );
  }
  const partners = fewestPartners(cohort, neighbours, assumed);
  if (partners === null || Math.min(sizes.partners, neighbours) < partners) {
    throw new PolicyError(
      `${sizes.partners} partners for masks in a cohort of ${cohort}: ${partners ?? cohort} are needed to hide it`,
    );
  }
}

/** The lowest threshold that keeps the secrets of a device with so many neighbours. */
export function lowestThreshold(cohort: number, neighbours: number, assumed: Assumptions): number {
  const corrupt = corruptNeighbours(cohort, neighbours, assumed);
  // At least 2, so that no single device can give a secret away.
  if (assumed.server === "semi-honest") return Math.max(corrupt + 1, 2);
  // A corrupt neighbour gives the server both shares, an honest one gives one. So both secrets of a device take
  // 2 threshold <= neighbours + corrupt. Of the honest ones that answered for its seed, as many as were missing when it
  // masked may share no mask with it; the rest are those who hide it.
  const low = Math.ceil((neighbours + corrupt + assumed.hidden) / 2);
  return Math.max(low, Math.floor((neighbours * 2) / 3) + 1);
}

/** How many of the neighbours must share masks; null where all of them are too few. */
export function fewestPartners(cohort: number, neighbours: number, assumed: Assumptions): number | null {
  // The bound on who hides a device counts on a mask with every neighbour.
  if (assumed.server === "malicious") return neighbours;
  const honest = cohort - countOf(assumed.corrupt, cohort) - countOf(assumed.dropped, cohort);
  const hides = (partners: number): boolean => disconnected(cohort, honest, partners) <= 2 ** -(assumed.security + 1);
  if (honest <= assumed.hidden || !hides(neighbours)) return null;
  let [fewest, most] = [1, neighbours];
  while (fewest < most) {
    const middle = Math.floor((fewest + most) / 2);
    if (hides(middle)) most = middle;
    else fewest = middle + 1;
  }
  return fewest;
}

/** How many corrupt ones any honest device has among its neighbours at most, but for 2^-(security + 1). */
function corruptNeighbours(cohort: number, neighbours: number, assumed: Assumptions): number {
  const corrupt = countOf(assumed.corrupt, cohort);
  const logFactorials = logFactorialsTo(cohort);
  const all = choose(logFactorials, cohort - 1, neighbours);
  // Over all devices, and half of what is allowed: the masks have the other half.
  const allowed = 2 ** -(assumed.security + 1);
  // P(more than `count`), from the small end, so that the tail's smallest terms are not lost beside the large ones.
  let tail = 0;
  for (let count = neighbours; count > 0; count--) {
    const ways = choose(logFactorials, corrupt, count);
    tail += Math.exp(ways + choose(logFactorials, cohort - 1 - corrupt, neighbours - count) - all);
    if (cohort * tail > allowed) return count;
  }
  return 0;
}

/**
 * A bound on P(the honest survivors fall into two parts without a mask between them): a union bound over all subsets of
 * them, of each size up to half. Nobody in it drew anybody of the rest, and nobody of the rest drew anybody in it.
 */
function disconnected(cohort: number, honest: number, partners: number): number {
  const logFactorials = logFactorialsTo(cohort);
  const all = choose(logFactorials, cohort - 1, partners);
  let sum = 0;
  for (let inside = 1; inside <= Math.floor(honest / 2); inside++) {
    const rest = honest - inside;
    const alone = choose(logFactorials, cohort - 1 - rest, partners) - all;
    const apart = choose(logFactorials, cohort - 1 - inside, partners) - all;
    sum += Math.exp(choose(logFactorials, honest, inside) + inside * alone + rest * apart);
  }
  return sum;
}

/** The logarithm of n over k; -Infinity where k is not within 0 ... n. */
function choose(logFactorials: Float64Array, n: number, k: number): number {
  if (k < 0 || k > n) return Number.NEGATIVE_INFINITY;
  return (logFactorials[n] as number) - (logFactorials[k] as number) - (logFactorials[n - k] as number);
}

let known = new Float64Array(1);

/** The logarithms of the factorials of 0 ... `most`. */
function logFactorialsTo(most: number): Float64Array {
  if (known.length > most) return known;
  const found = new Float64Array(most + 1);
  // Kahan's summation: each is exact but for the rounding of one logarithm.
  let [sum, lost] = [0, 0];
  for (let n = 2; n <= most; n++) {
    const term = Math.log(n) - lost;
    const next = sum + term;
    lost = next - sum - term;
    sum = next;
    found[n] = sum;
  }
  known = found;
  return found;
}

function countOf(share: number, cohort: number): number {
  return Math.floor(share * cohort + SMALL);
}
