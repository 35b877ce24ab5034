/**
 * The sum of numbers, rounded once (Shewchuk 1997, "Adaptive precision floating-point arithmetic").
 *
 * Python's `math.fsum` gives the same, so that metrics reduced here and there are equal.
 */
export function exactSum(values: readonly number[]): number {
  let partials: number[] = [];
  for (const value of values) {
    if (!Number.isFinite(value)) return values.reduce((sum, each) => sum + each, 0);
    let x = value;
    const next: number[] = [];
    for (const partial of partials) {
      const [large, small] = Math.abs(x) < Math.abs(partial) ? [partial, x] : [x, partial];
      const sum = large + small;
      const rest = small - (sum - large);
      if (rest) next.push(rest);
      x = sum;
    }
    next.push(x);
    partials = next;
  }
  return round(partials);
}

/** The sum of partials that do not overlap, from small to large, rounded half to even. */
function round(partials: readonly number[]): number {
  let at = partials.length - 1;
  let sum = partials[at] ?? 0;
  let rest = 0;
  while (at > 0) {
    const x = sum;
    const y = partials[--at] as number;
    sum = x + y;
    rest = y - (sum - x);
    if (rest) break;
  }
  const below = partials[at - 1] ?? 0;
  if ((rest < 0 && below < 0) || (rest > 0 && below > 0)) {
    // Exactly between two numbers so far: the partials below decide.
    const doubled = rest * 2;
    const other = sum + doubled;
    if (doubled === other - sum) return other;
  }
  return sum;
}
