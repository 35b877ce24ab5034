/** Storage that a browser does not clear by itself when the disk is full or the site was not visited for long. */

let asked: Promise<boolean> | null = null;

/**
 * Ask the browser to keep what this site stores, once a page; some ask their user. false where it does not, and in
 * workers, which cannot ask.
 */
export function persistStorage(): Promise<boolean> {
  asked ??= ask();
  return asked;
}

async function ask(): Promise<boolean> {
  const storage = globalThis.navigator?.storage as StorageManager | undefined;
  if (typeof document !== "object" || typeof storage?.persist !== "function") return false;
  try {
    return (await storage.persisted()) || (await storage.persist());
  } catch {
    return false;
  }
}
