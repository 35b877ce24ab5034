/**
 * Exact samples of the discrete Gaussian distribution.
 *
 * Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), algorithms 1 to 3. Integer
 * arithmetic only: floating-point samplers leak what they should hide (Mironov, "On significance of the least
 * significant bits for differential privacy", 2012).
 */

/** How many bytes -> that many uniformly random bytes. */
export type Randomness = (count: number) => Uint8Array;

const CHUNK = 1 << 12;

export const systemRandomness: Randomness = (count) => crypto.getRandomValues(new Uint8Array(count));

/** Samples k with probability proportional to exp(-k^2 / (2 sigma^2)), for the exact value of `sigma`. */
export class DiscreteGaussian {
  private readonly bits: Bits;
  private readonly t: bigint;
  // The acceptance exponent (|y| - sigma^2/t)^2 / (2 sigma^2), as ((|y| * a - b)^2) / c in integers.
  private readonly a: bigint;
  private readonly b: bigint;
  private readonly c: bigint;

  constructor(sigma: number, randomness: Randomness = systemRandomness) {
    const [numerator, denominator] = exactFraction(sigma);
    this.bits = new Bits(randomness);
    this.t = numerator / denominator + 1n;
    const [p, q] = [numerator * numerator, denominator * denominator];
    this.a = q * this.t;
    this.b = p;
    this.c = 2n * p * q * this.t * this.t;
  }

  sample(count: number): bigint[] {
    return Array.from({ length: count }, () => this.one());
  }

  private one(): bigint {
    for (;;) {
      const y = this.laplace();
      const offset = (y < 0n ? -y : y) * this.a - this.b;
      if (this.bernoulliExp(offset * offset, this.c)) return y;
    }
  }

  /** Algorithm 2: probability proportional to exp(-|y| / t). */
  private laplace(): bigint {
    for (;;) {
      const u = this.bits.below(this.t);
      if (!this.bernoulliExp(u, this.t)) continue;
      let v = 0n;
      while (this.bernoulliExp(1n, 1n)) v++;
      const y = u + this.t * v;
      if (this.bits.below(2n) === 0n) return y;
      if (y !== 0n) return -y;
    }
  }

  /** Algorithm 1: true with probability exp(-numerator / denominator). */
  private bernoulliExp(numerator: bigint, denominator: bigint): boolean {
    let rest = numerator;
    for (; rest > denominator; rest -= denominator) {
      if (!this.bernoulliExp(1n, 1n)) return false;
    }
    let k = 1n;
    while (this.bits.below(denominator * k) < rest) k++;
    return k % 2n === 1n;
  }
}

/** Uniform integers from a byte source that is asked for chunks. */
class Bits {
  private chunk: Uint8Array = new Uint8Array();
  private at = 0;

  constructor(private readonly randomness: Randomness) {}

  /** Uniform on 0 ... bound - 1, by rejection. */
  below(bound: bigint): bigint {
    const bits = bound === 1n ? 0 : (bound - 1n).toString(2).length;
    const size = Math.ceil(bits / 8);
    const excess = BigInt(size * 8 - bits);
    for (;;) {
      let value = 0n;
      const bytes = this.take(size);
      for (let index = size - 1; index >= 0; index--) value = (value << 8n) | BigInt(bytes[index] as number);
      value >>= excess;
      if (value < bound) return value;
    }
  }

  private take(size: number): Uint8Array {
    if (this.at + size > this.chunk.length) {
      this.chunk = this.randomness(Math.max(CHUNK, size));
      this.at = 0;
    }
    this.at += size;
    return this.chunk.subarray(this.at - size, this.at);
  }
}

/** A positive number as a fraction of integers in lowest terms, exactly. */
function exactFraction(value: number): [numerator: bigint, denominator: bigint] {
  if (!(value > 0 && Number.isFinite(value)))
    throw new RangeError(`discrete Gaussian: sigma must be above 0: ${value}`);
  let [significand, exponent] = [value, 0];
  while (!Number.isInteger(significand)) {
    significand *= 2;
    exponent++;
  }
  return [BigInt(significand), 2n ** BigInt(exponent)];
}
