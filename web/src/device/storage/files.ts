/** Bundles and weights by digest, in the browser's storage; every byte is verified before each use. */

import { sha256 } from "../../bundle/digests.js";
import { type Bundle, openBundle } from "../../bundle/reader.js";
import { readWeights } from "../../bundle/weights.js";
import { BundleError, DigestError } from "../../errors.js";
import type { NdArray } from "../../arrays.js";
import type { Bytes } from "../bytes.js";
import type { Config } from "../config.js";
import type { DeviceSession } from "../rounds/session.js";
import type { Change, DeviceDatabase } from "./database.js";

/** When each file was used last (Unix milliseconds), and how large it is. */
type Uses = Readonly<Record<string, { readonly at: number; readonly bytes: number }>>;

export class Files {
  constructor(
    private readonly database: DeviceDatabase,
    private readonly session: Pick<DeviceSession, "download">,
    private readonly config: Config,
  ) {}

  /**
   * The bundle whose manifest has this digest, fetched if it is not here. Raises BundleError, TooLargeError,
   * RefusedError, UnreachableError.
   */
  bundle(digest: string, trustedKeys: readonly Uint8Array[]): Promise<Bundle> {
    return this.use(digest, `/v1/bundles/${digest}`, async (data) => {
      const bundle = await openBundle(data, trustedKeys, this.config.allowDevelopment);
      // A genuine bundle of the same publisher, but not the one of the plan.
      if (bundle.digest !== digest) {
        throw new DigestError(`bundle: asked for ${digest}, the server sent ${bundle.digest}`);
      }
      return bundle;
    });
  }

  /** The tensors of the safetensors file with this digest. Raises as `bundle`. */
  weights(digest: string): Promise<ReadonlyMap<string, NdArray>> {
    return this.use(digest, `/v1/blobs/${digest}`, async (data) => {
      const actual = await sha256(data);
      if (actual !== digest) throw new DigestError(`weights: asked for ${digest}, the server sent ${actual}`);
      return readWeights(data, this.config.maxDownloadBytes);
    });
  }

  /** The weights with this digest, if they are here and not damaged; null otherwise. */
  async keptWeights(digest: string): Promise<ReadonlyMap<string, NdArray> | null> {
    const kept = await this.database.get<Bytes>("files", digest);
    if (kept === undefined || (await sha256(kept)) !== digest) return null;
    return readWeights(kept, this.config.maxDownloadBytes);
  }

  /** A file with this digest that is nowhere kept. Raises DigestError, ... */
  async once(digest: string, limit: number): Promise<Bytes> {
    const data = await this.session.download(`/v1/blobs/${digest}`, limit);
    const actual = await sha256(data);
    if (actual !== digest) throw new DigestError(`file: asked for ${digest}, the server sent ${actual}`);
    return data;
  }

  private async use<T>(digest: string, path: string, read: (data: Bytes) => Promise<T>): Promise<T> {
    const kept = await this.database.get<Bytes>("files", digest);
    if (kept !== undefined) {
      try {
        const result = await read(kept);
        await this.note(digest, kept.length, []);
        return result;
      } catch (error) {
        // The disk has damaged it, or the owner has changed the publishers: what is fetched says it.
        if (!(error instanceof BundleError)) throw error;
      }
    }
    const fetched = await this.session.download(path, this.config.maxDownloadBytes);
    const result = await read(fetched);
    await this.note(digest, fetched.length, [{ store: "files", key: digest, value: fetched }]);
    return result;
  }

  /** Note the use, with these changes, and remove what was not used for longest until the rest fits. */
  private async note(digest: string, bytes: number, changes: Change[]): Promise<void> {
    const uses = { ...((await this.database.get<Uses>("books", "files")) ?? {}), [digest]: { at: Date.now(), bytes } };
    let total = Object.values(uses).reduce((sum, use) => sum + use.bytes, 0);
    for (const [oldest, use] of Object.entries(uses).sort(([, one], [, other]) => one.at - other.at)) {
      if (total <= this.config.maxCacheBytes || oldest === digest) continue;
      total -= use.bytes;
      delete uses[oldest];
      changes.push({ store: "files", key: oldest });
    }
    await this.database.write({ store: "books", key: "files", value: uses }, ...changes);
  }
}
