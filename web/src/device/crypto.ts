/** The browser's cryptography: Ed25519, X25519, HKDF-SHA256, AES-256 in GCM and CTR. Keys and secrets have 32 bytes. */

import { hex, webCrypto } from "../bundle/digests.js";
import { type Bytes, concat, uint32Bytes, unhex } from "./bytes.js";
import { ClientError, SecureAggregationError } from "./errors.js";

export const KEY_BYTES = 32;

/** The fixed bytes of a PKCS #8 private key of 32 bytes (RFC 8410), without the key. */
const PKCS8_ED25519 = "302e020100300506032b657004220420";
const PKCS8_X25519 = "302e020100300506032b656e04220420";

/** `count` bytes of the browser's cryptographic generator. */
export function randomBytes(count: number): Bytes {
  return crypto.getRandomValues(new Uint8Array(count));
}

/** `count` bytes of `randomness`. Raises SecureAggregationError for another number of bytes. */
export function drawExactly(randomness: (bytes: number) => Bytes, count: number): Bytes {
  const drawn = randomness(count);
  // Too short a draw would still make keys, which somebody could guess.
  if (drawn.length === count) return drawn;
  throw new SecureAggregationError(`randomness: asked for ${count} bytes, got ${drawn.length}`);
}

/** SHA-256, 32 bytes. */
export async function digest(data: Uint8Array): Promise<Bytes> {
  return new Uint8Array(await webCrypto().digest("SHA-256", data as Bytes));
}

// --- Ed25519 --------------------------------------------------------------------------------------------------------

/** A pair that signs; the private half cannot be read, also not by this page. */
export interface SigningKey {
  readonly privateKey: CryptoKey;
  readonly publicKey: Bytes;
}

export async function generateSigningKey(): Promise<SigningKey> {
  const pair = await supported("Ed25519", () => webCrypto().generateKey("Ed25519", false, ["sign", "verify"]));
  const { privateKey, publicKey } = pair as CryptoKeyPair;
  return { privateKey, publicKey: new Uint8Array(await webCrypto().exportKey("raw", publicKey)) };
}

/** The pair of a seed, which the private key is made of (RFC 8032). */
export async function signingKeyOf(seed: Uint8Array): Promise<SigningKey> {
  const encoded = concat(unhex(PKCS8_ED25519), seed);
  const readable = await supported("Ed25519", () =>
    webCrypto().importKey("pkcs8", encoded, "Ed25519", true, ["sign"]),
  );
  // Only a JSON Web Key tells the public half of a private key.
  const { x = "" } = await webCrypto().exportKey("jwk", readable);
  const publicKey = Uint8Array.from(atob(x.replace(/-/g, "+").replace(/_/g, "/")), (letter) => letter.charCodeAt(0));
  const privateKey = await webCrypto().importKey("pkcs8", encoded, "Ed25519", false, ["sign"]);
  return { privateKey, publicKey };
}

export async function sign(key: SigningKey, message: Uint8Array): Promise<Bytes> {
  return new Uint8Array(await webCrypto().sign("Ed25519", key.privateKey, message as Bytes));
}

/** Whether `publicKey` (32 bytes) signed the message. */
export async function verifies(publicKey: Uint8Array, signature: Uint8Array, message: Uint8Array): Promise<boolean> {
  const subtle = webCrypto();
  let key: CryptoKey;
  try {
    key = await subtle.importKey("raw", publicKey as Bytes, "Ed25519", false, ["verify"]);
  } catch (error) {
    if (error instanceof Error && error.name === "NotSupportedError") throw unsupported("Ed25519");
    // No point of the curve: no signature is valid under it.
    return false;
  }
  return subtle.verify("Ed25519", key, signature as Bytes, message as Bytes);
}

// --- X25519 ---------------------------------------------------------------------------------------------------------

const BASE_POINT = Uint8Array.from({ length: KEY_BYTES }, (_, index) => (index === 0 ? 9 : 0));

export async function agreementKey(secret: Uint8Array): Promise<CryptoKey> {
  const encoded = concat(unhex(PKCS8_X25519), secret);
  return supported("X25519", () => webCrypto().importKey("pkcs8", encoded, "X25519", false, ["deriveBits"]));
}

/** The public key of a private one: its agreement with the base point 9 (RFC 7748, section 6.1). */
export async function publicKeyOf(secret: Uint8Array): Promise<Bytes> {
  return agree(await agreementKey(secret), BASE_POINT);
}

/**
 * The shared secret. Raises SecureAggregationError for a public key that is none, or one of small order, with which
 * every private key agrees on zero.
 */
export async function agree(own: CryptoKey, peer: Uint8Array): Promise<Bytes> {
  try {
    const publicKey = await webCrypto().importKey("raw", peer as Bytes, "X25519", false, []);
    const shared = new Uint8Array(await webCrypto().deriveBits({ name: "X25519", public: publicKey }, own, 256));
    if (shared.some((byte) => byte !== 0)) return shared;
  } catch {
    // Browsers refuse such keys with errors of several names.
  }
  throw new SecureAggregationError(`round key ${hex(peer.subarray(0, 8))}... is not a usable X25519 public key`);
}

// --- HKDF and AES ---------------------------------------------------------------------------------------------------

/** 32 bytes by HKDF-SHA256 (RFC 5869). */
export async function derive(secret: Uint8Array, salt: Uint8Array, info: Uint8Array): Promise<Bytes> {
  const key = await webCrypto().importKey("raw", secret as Bytes, "HKDF", false, ["deriveBits"]);
  const parameters = { name: "HKDF", hash: "SHA-256", salt: salt as Bytes, info: info as Bytes };
  return new Uint8Array(await webCrypto().deriveBits(parameters, key, 8 * KEY_BYTES));
}

/** AES-256-GCM: the ciphertext and a tag of 16 bytes. `nonce` has 12 bytes. */
export async function encrypt(
  key: Uint8Array | CryptoKey,
  nonce: Uint8Array,
  plain: Uint8Array,
  associated: Uint8Array,
): Promise<Bytes> {
  const parameters = { name: "AES-GCM", iv: nonce as Bytes, additionalData: associated as Bytes };
  return new Uint8Array(await webCrypto().encrypt(parameters, await gcmKey(key, "encrypt"), plain as Bytes));
}

/** What `encrypt` encrypted; null where key, nonce, ciphertext or associated data are others. */
export async function decrypt(
  key: Uint8Array | CryptoKey,
  nonce: Uint8Array,
  sealed: Uint8Array,
  associated: Uint8Array,
): Promise<Bytes | null> {
  const parameters = { name: "AES-GCM", iv: nonce as Bytes, additionalData: associated as Bytes };
  const opening = await gcmKey(key, "decrypt");
  try {
    return new Uint8Array(await webCrypto().decrypt(parameters, opening, sealed as Bytes));
  } catch (error) {
    if (error instanceof Error && error.name === "OperationError") return null;
    throw error;
  }
}

/** The key stream of AES-256-CTR with a nonce of 0: `bytes` bytes from block `block` on. */
export async function keyStream(key: CryptoKey, block: number, bytes: number): Promise<ArrayBuffer> {
  const counter = concat(new Uint8Array(12), uint32Bytes(block));
  return webCrypto().encrypt({ name: "AES-CTR", counter, length: 64 }, key, new Uint8Array(bytes));
}

export async function streamKey(key: Uint8Array): Promise<CryptoKey> {
  return webCrypto().importKey("raw", key as Bytes, "AES-CTR", false, ["encrypt"]);
}

async function gcmKey(key: Uint8Array | CryptoKey, use: "encrypt" | "decrypt"): Promise<CryptoKey> {
  if (!(key instanceof Uint8Array)) return key;
  return webCrypto().importKey("raw", key as Bytes, "AES-GCM", false, [use]);
}

async function supported<T>(name: string, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    throw error instanceof Error && error.name === "NotSupportedError" ? unsupported(name) : error;
  }
}

function unsupported(name: string): ClientError {
  return new ClientError(`this browser has no ${name}, so it cannot be a device; update it`);
}
