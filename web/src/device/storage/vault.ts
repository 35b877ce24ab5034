/**
 * The device's secrets: keys that neither this page nor another can read, and what is sealed with them.
 *
 * All of them are CryptoKeys that are not extractable; the browser keeps their bytes. Whoever can run scripts of this
 * origin can use them, and cannot take them away.
 */

import { webCrypto } from "../../bundle/digests.js";
import { type Bytes, utf8 } from "../bytes.js";
import { decrypt, encrypt, generateSigningKey, randomBytes, type SigningKey } from "../crypto.js";
import { ClientError } from "../errors.js";
import type { Change, DeviceDatabase } from "./database.js";

const NONCE_BYTES = 12;
const SEED_LABEL = utf8("archipel/agent/1/seed");

interface Keys {
  readonly identity: SigningKey;
  /** AES-256-GCM: seals personal state and masked updates. */
  readonly sealing: CryptoKey;
  /** HKDF: the seeds of rounds. */
  readonly seeds: CryptoKey;
}

/** Sealed bytes as they lie in the database. */
export interface SealedBytes {
  readonly nonce: Bytes;
  readonly data: Bytes;
}

export class Vault {
  private constructor(
    private keys: Keys,
    private next: SigningKey | null,
  ) {}

  /** The device's keys, made where there are none. */
  static async open(database: DeviceDatabase): Promise<Vault> {
    const there = await database.get<Keys>("own", "keys");
    if (there !== undefined) return new Vault(there, (await database.get<SigningKey>("own", "next-key")) ?? null);
    const subtle = webCrypto();
    const secret = randomBytes(32);
    const keys: Keys = {
      identity: await generateSigningKey(),
      sealing: await subtle.generateKey({ name: "AES-GCM", length: 256 }, false, ["encrypt", "decrypt"]),
      seeds: await subtle.importKey("raw", secret, "HKDF", false, ["deriveBits"]),
    };
    secret.fill(0);
    await database.write({ store: "own", key: "keys", value: keys });
    return new Vault(keys, null);
  }

  get identity(): SigningKey {
    return this.keys.identity;
  }

  /** Whether there is a next key, which the server may have taken already. */
  get rotating(): boolean {
    return this.next !== null;
  }

  /** The key that is to replace `identity`: made by the first call, and in the database when it resolves. */
  async nextIdentity(database: DeviceDatabase): Promise<SigningKey> {
    if (this.next !== null) return this.next;
    const next = await generateSigningKey();
    await database.write({ store: "own", key: "next-key", value: next });
    this.next = next;
    return next;
  }

  /** Make the next key the device's, in one transaction with `changes`. */
  async replaceIdentity(database: DeviceDatabase, ...changes: readonly Change[]): Promise<void> {
    if (this.next === null) throw new ClientError("rotation: there is no next key");
    const keys: Keys = { ...this.keys, identity: this.next };
    await database.write({ store: "own", key: "keys", value: keys }, { store: "own", key: "next-key" }, ...changes);
    [this.keys, this.next] = [keys, null];
  }

  /** `place` is where the bytes are kept, so that nobody can put one sealed entry in the place of another. */
  async seal(place: string, data: Uint8Array): Promise<SealedBytes> {
    const nonce = randomBytes(NONCE_BYTES);
    return { nonce, data: await encrypt(this.keys.sealing, nonce, data, utf8(place)) };
  }

  /** What `seal` sealed for this place. Raises ClientError for anything else. */
  async open(place: string, sealed: SealedBytes): Promise<Bytes> {
    const data = await decrypt(this.keys.sealing, sealed.nonce, sealed.data, utf8(place));
    if (data === null) throw new ClientError(`${place}: damaged, or sealed with another key; erase the device`);
    return data;
  }

  /**
   * The randomness of a round, 0 to 2^32 - 1: the order of the examples, and what graphs draw with their seed. It is
   * derived from a secret of this device, so neither server nor publisher can predict or recompute it.
   */
  async roundSeed(plan: string): Promise<number> {
    const parameters = { name: "HKDF", hash: "SHA-256", salt: utf8(plan), info: SEED_LABEL };
    const derived = await webCrypto().deriveBits(parameters, this.keys.seeds, 32);
    return new DataView(derived).getUint32(0);
  }
}
