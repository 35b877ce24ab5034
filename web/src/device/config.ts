/** The owner's settings: what the device may use, and how long it waits. */

import { ClientError } from "./errors.js";

/** Sizes are in bytes, times in seconds. */
export interface DeviceSettings {
  /** Of the device in this profile; another name is another device. Default: "device". */
  readonly name?: string | undefined;
  /** The server's address; default: the one in the enrolment token. The pinned key stays that of the token. */
  readonly server?: string | undefined;
  /** Whether the address may be plain http:// to another machine. Default: no. */
  readonly allowHttp?: boolean | undefined;
  /** What the device reports about itself at every check-in, for the eligibility of tasks. */
  readonly attributes?: Readonly<Record<string, string | number | boolean>> | undefined;

  /** The device refuses a round that may have fewer devices, whatever the publisher's policy allows. Default: 2. */
  readonly minCohort?: number | undefined;
  /** The most rounds in any 24 hours, up to 256; default: any number. */
  readonly maxRoundsPerDay?: number | undefined;
  /**
   * The most epsilon (at delta 1e-6) that all rounds together may cost each local example. With a limit the device
   * refuses rounds whose bundle states no noise. Default: no limit.
   */
  readonly maxEpsilon?: number | undefined;
  /** Of the pinned publishers' keys (64 hexadecimal digits) only these count. Default: all. */
  readonly publishers?: readonly string[] | undefined;
  /** Whether bundles of development keys are taken, which are for trying out only. Default: no. */
  readonly allowDevelopment?: boolean | undefined;
  /** The device enrols in these populations only. Default: any. */
  readonly populations?: readonly string[] | undefined;
  /** The device refuses a bundle whose programs may need more memory. Default: 512 MiB. */
  readonly maxPeakBytes?: number | undefined;
  /** The device refuses a round that uploads more bytes. Default: 64 MiB. */
  readonly maxUploadBytes?: number | undefined;
  /** The device refuses a round that sends more numbers. Default: 16 million. */
  readonly maxUploadEntries?: number | undefined;
  /** The device does not fetch larger bundles or weights. Default: 256 MiB. */
  readonly maxDownloadBytes?: number | undefined;
  /** How many bytes of bundles and weights stay in the browser's storage. Default: 256 MiB. */
  readonly maxCacheBytes?: number | undefined;
  /** Whether the server is told which kind of limit a refused round exceeded. Default: yes. */
  readonly tellWhy?: boolean | undefined;
  /**
   * Whether the device takes the versions of models that the server offers. It reports which version it has fetched,
   * and never which one runs. Default: no.
   */
  readonly adopt?: boolean | undefined;
  /**
   * After the device has decided about a fetched version, it sends nothing until this many seconds, or a multiple of
   * them, have passed since it began: the time that it took must not tell the server what it decided. Default: 120.
   */
  readonly lookSeconds?: number | undefined;
  /**
   * A version that is worse on the device's own examples by more than this share of the running version's loss (or
   * accuracy) is not adopted. Default: 0.05.
   */
  readonly maxWorse?: number | undefined;

  /** How long one answer may take. Default: 300. */
  readonly requestTimeout?: number | undefined;
  /** How often a request is tried before the server counts as unreachable. Default: 4. */
  readonly attempts?: number | undefined;
  /** The first wait between attempts; it doubles, with jitter, up to `maxWait`. Default: 0.25. */
  readonly backoff?: number | undefined;
  /** The longest wait between two requests of a round. Default: 60. */
  readonly maxWait?: number | undefined;
  /**
   * How long the server may keep the answer to a check-in of `runForever` back, until the device is in a round; 0: not
   * at all. Default: 20.
   */
  readonly waitSeconds?: number | undefined;
  /** How long a round goes on without an answer from the server. Default: 120. */
  readonly patience?: number | undefined;
  /** How long a round may take in all. Default: 3600. */
  readonly roundTimeout?: number | undefined;
  /** After how long the device asks again whether conditions hold that did not. Default: 30. */
  readonly pauseSeconds?: number | undefined;
  /** How long work in a round may stand still because conditions do not hold. Default: 120. */
  readonly resumeWithin?: number | undefined;
  /** The longest wait until the device tries an unreachable server again. Default: 900. */
  readonly maxOfflineWait?: number | undefined;
}

export type Config = {
  readonly [K in keyof DeviceSettings]-?: K extends "maxRoundsPerDay" | "maxEpsilon"
    ? number | null
    : NonNullable<DeviceSettings[K]>;
};

const DEFAULTS: Config = {
  name: "device",
  server: "",
  allowHttp: false,
  attributes: {},
  minCohort: 2,
  maxRoundsPerDay: null,
  maxEpsilon: null,
  publishers: [],
  allowDevelopment: false,
  populations: [],
  maxPeakBytes: 512 * 2 ** 20,
  maxUploadBytes: 64 * 2 ** 20,
  maxUploadEntries: 16 * 2 ** 20,
  maxDownloadBytes: 256 * 2 ** 20,
  maxCacheBytes: 256 * 2 ** 20,
  tellWhy: true,
  adopt: false,
  lookSeconds: 120,
  maxWorse: 0.05,
  requestTimeout: 300,
  attempts: 4,
  backoff: 0.25,
  maxWait: 60,
  waitSeconds: 20,
  patience: 120,
  roundTimeout: 3600,
  pauseSeconds: 30,
  resumeWithin: 120,
  maxOfflineWait: 900,
};

/** The least value of each number; a setting of another kind is not here. */
const LEAST: Readonly<Record<string, number>> = {
  minCohort: 1, maxRoundsPerDay: 0, maxEpsilon: 0, maxPeakBytes: 0, maxUploadBytes: 0, maxUploadEntries: 0,
  maxDownloadBytes: 0, maxCacheBytes: 0, lookSeconds: 0.001, maxWorse: 0, requestTimeout: 0.001, attempts: 1,
  backoff: 0.001, maxWait: 0.001, waitSeconds: 0, patience: 0.001, roundTimeout: 0.001, pauseSeconds: 0.001,
  resumeWithin: 0.001, maxOfflineWait: 0.001,
};
const MAX_ROUNDS_PER_DAY = 256;
/** The longest that a check-in may ask for. */
const MAX_WAIT_SECONDS = 300;

/** The settings with their defaults. Raises ClientError that names the one that is none. */
export function configOf(given: DeviceSettings): Config {
  const known = Object.entries(given).filter(([, value]) => value !== undefined);
  for (const [name, value] of known) {
    if (!(name in DEFAULTS)) throw new ClientError(`setting ${name}: there is none; see the documentation's list`);
    const expected = DEFAULTS[name as keyof Config];
    const least = LEAST[name];
    if (least !== undefined) {
      if (typeof value !== "number" || !Number.isFinite(value) || value < least) {
        throw new ClientError(`setting ${name}: expected a number of at least ${least}, got ${String(value)}`);
      }
    } else if (typeof value !== typeof expected || value === null || Array.isArray(value) !== Array.isArray(expected)) {
      throw new ClientError(`setting ${name}: expected such as ${JSON.stringify(expected)}, got ${String(value)}`);
    }
  }
  const config: Config = { ...DEFAULTS, ...Object.fromEntries(known) };
  if (!/^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/.test(config.name)) {
    throw new ClientError(`setting name: expected letters, digits, '.', '_' and '-', got ${config.name.slice(0, 80)}`);
  }
  // The journal keeps so many rounds that were not refused, so it cannot count more.
  if (config.maxRoundsPerDay !== null && config.maxRoundsPerDay > MAX_ROUNDS_PER_DAY) {
    throw new ClientError(`setting maxRoundsPerDay: at most ${MAX_ROUNDS_PER_DAY}, got ${config.maxRoundsPerDay}`);
  }
  if (config.waitSeconds > MAX_WAIT_SECONDS) {
    throw new ClientError(`setting waitSeconds: at most ${MAX_WAIT_SECONDS}, got ${config.waitSeconds}`);
  }
  return config;
}

/** The address without a slash at its end. Raises ClientError for one that the device must not talk to. */
export function checkedServer(address: string, allowHttp: boolean): string {
  let url: URL;
  try {
    url = new URL(address);
  } catch {
    throw new ClientError("server: expected an address such as https://federation.example:8443");
  }
  const plain = url.protocol === "http:";
  if (!(plain || url.protocol === "https:") || url.username || url.password || url.search || url.hash) {
    // The address is not shown: somebody may have put credentials into it.
    throw new ClientError("server: expected an address such as https://federation.example:8443");
  }
  // RFC 6761 reserves `localhost` for this machine.
  const here = url.hostname === "localhost" || url.hostname === "[::1]" || /^127\.\d+\.\d+\.\d+$/.test(url.hostname);
  if (plain && !here && !allowHttp) {
    throw new ClientError(
      `server: plain http:// to ${url.hostname}, where everybody on the way can read along; use https://, or set ` +
        "allowHttp where the way is protected otherwise",
    );
  }
  return url.href.replace(/\/+$/, "");
}
