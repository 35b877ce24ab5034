/** One device per profile: the tab that holds the lock is the device, all others wait or go without. */

import { ClientError, OtherTabError } from "./errors.js";

export interface Lock {
  release(): void;
}

/**
 * The lock of this name. Where another tab has it: raises OtherTabError, or with `wait` resolves when that tab is
 * closed. The browser releases it when the page or worker ends, also when it crashes. Raises the signal's reason.
 */
export function acquireLock(name: string, wait: boolean, signal?: AbortSignal): Promise<Lock> {
  const { locks } = globalThis.navigator ?? {};
  if (locks === undefined) {
    return Promise.reject(
      new ClientError("this browser has no Web Locks, so two tabs could be one device at once; update it"),
    );
  }
  return new Promise<Lock>((resolve, reject) => {
    const options: LockOptions = wait ? (signal === undefined ? {} : { signal }) : { ifAvailable: true };
    const held = (lock: unknown): Promise<void> | void => {
      if (lock === null) {
        reject(new OtherTabError("another tab of this browser is this device already; close it, or wait for it"));
        return undefined;
      }
      // The lock is held until the promise is settled.
      return new Promise<void>((release) => resolve({ release }));
    };
    locks.request(name, options, held).catch(reject);
  });
}
