/** How many devices a plan needs against how many that work with the server (archipel/protocol/policy.py). */

/**
 * Whether a server with so many colluders can have two groups of the cohort confirm different survivors: two groups of
 * `threshold` are impossible if threshold > (devices + colluders) / 2.
 */
export function splits(threshold: number, devices: number, colluders: number): boolean {
  return 2 * threshold <= devices + colluders;
}

/** A number as a fraction of integers, from the decimal digits that people wrote: 0.1 is one tenth. */
export interface Fraction {
  readonly numerator: bigint;
  readonly denominator: bigint;
}

export function fractionOf(number: number): Fraction {
  const [digits = "0", exponent = "0"] = String(number).split("e");
  const [whole = "0", decimals = ""] = digits.split(".");
  const shift = Number(exponent) - decimals.length;
  const numerator = BigInt(whole + decimals);
  return shift >= 0
    ? { numerator: numerator * 10n ** BigInt(shift), denominator: 1n }
    : { numerator, denominator: 10n ** BigInt(-shift) };
}

/** C = floor(share x max_cohort), exact: 1/3 as a float is a little less than a third, so it is taken for 1/3. */
export function colludersOf(share: number, maxCohort: number): number {
  const { numerator, denominator } = limitDenominator(fractionOf(share), 1_000_000n);
  return Number((numerator * BigInt(maxCohort)) / denominator);
}

/** The fraction nearest to `given` whose denominator is at most `most`, as `Fraction.limit_denominator` of Python. */
function limitDenominator(given: Fraction, most: bigint): Fraction {
  const divisor = gcd(given.numerator, given.denominator);
  const [start, end] = [given.numerator / divisor, given.denominator / divisor];
  if (end <= most) return { numerator: start, denominator: end };
  // Continued fractions: the best lower and upper bounds with small denominators.
  let [p0, q0, p1, q1] = [0n, 1n, 1n, 0n];
  let [n, d] = [start, end];
  for (;;) {
    const whole = n / d;
    const q2 = q0 + whole * q1;
    if (q2 > most) break;
    [p0, q0, p1, q1] = [p1, q1, p0 + whole * p1, q2];
    [n, d] = [d, n - whole * d];
  }
  const k = (most - q0) / q1;
  // Of the two candidates the nearer one; of two as near the one with the smaller denominator.
  if (2n * d * (q0 + k * q1) <= end) return { numerator: p1, denominator: q1 };
  return { numerator: p0 + k * p1, denominator: q0 + k * q1 };
}

function gcd(one: bigint, other: bigint): bigint {
  return other ? gcd(other, one % other) : one;
}
