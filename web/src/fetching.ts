/** Files from a server that may be busy: it refuses them with 429 or 503, and says in Retry-After when to ask again. */

const TELLS_WHEN: ReadonlySet<number> = new Set([429, 503]);
/** For so long in all a file is asked for again. */
const PATIENCE_MS = 120_000;
/** For a server that does not say when. */
const PAUSE_MS = 1000;

// What a worker puts in the place of this one calls it (worker/serving.ts).
const once = globalThis.fetch.bind(globalThis);

/**
 * `fetch` of something that may be read twice, which waits while the server is busy. Gives the last refusal where that
 * takes longer than two minutes; raises what `fetch` raises, also while it waits.
 */
export async function fetchPatiently(input: RequestInfo | URL, init?: RequestInit): Promise<Response> {
  for (const begun = Date.now(); ; ) {
    const response = await once(input instanceof Request ? input.clone() : input, init);
    if (!TELLS_WHEN.has(response.status)) return response;
    // A little later than asked for, or all browsers that were refused together would come together again.
    const pause = pauseOf(response.headers.get("retry-after")) * (1 + Math.random() / 2);
    if (Date.now() - begun + pause > PATIENCE_MS) return response;
    await response.body?.cancel();
    await sleep(pause, init?.signal ?? undefined);
  }
}

/** Milliseconds from a Retry-After header: whole seconds, or a date (RFC 9110, section 10.2.3). */
export function pauseOf(header: string | null): number {
  if (header === null) return PAUSE_MS;
  if (/^\s*\d+\s*$/.test(header)) return 1000 * Number(header);
  const left = Date.parse(header) - Date.now();
  return Number.isNaN(left) ? PAUSE_MS : Math.max(0, left);
}

/** What `work` gives, or the signal's reason if that comes first; `stop` is called then. */
export async function abortable<T>(work: Promise<T>, signal: AbortSignal | undefined, stop?: () => void): Promise<T> {
  if (signal === undefined) return work;
  let listener: () => void = () => undefined;
  const aborted = new Promise<never>((_, reject) => {
    listener = () => {
      reject(signal.reason);
      stop?.();
    };
    if (signal.aborted) listener();
    else signal.addEventListener("abort", listener);
  });
  try {
    return await Promise.race([work, aborted]);
  } finally {
    signal.removeEventListener("abort", listener);
    // Whichever of the two comes last, nobody waits for it.
    work.catch(() => undefined);
    aborted.catch(() => undefined);
  }
}

function sleep(ms: number, signal: AbortSignal | undefined): Promise<void> {
  let timer: ReturnType<typeof setTimeout>;
  const slept = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, ms);
  });
  return abortable(slept, signal, () => clearTimeout(timer));
}
