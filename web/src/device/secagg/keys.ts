/** Keys of one secure round: HKDF-SHA256 with a label for every use (archipel/protocol/secagg/keys.py). */

import { type Bytes, compareBytes, concat, label, uint32Bytes, unhex } from "../bytes.js";
import { derive } from "../crypto.js";
import { MessageError } from "../errors.js";

const PRIME = 2n ** 255n - 19n;
/** Every encoding of a point of order 1, 2, 4 or 8 on the curve and its twist, with the highest bit cleared. */
const SMALL_ORDER: ReadonlySet<bigint> = new Set([
  0n,
  1n,
  325606250916557431795983626356110631294008115727848805560023387167927233504n,
  39382357235489614581723060781553021112529911719440698176882885853963445705823n,
  PRIME - 1n,
  PRIME,
  PRIME + 1n,
]);

/** Whether every private key agrees with this public key on zero (RFC 7748, section 6.1). */
export function isSmallOrder(publicKey: Uint8Array): boolean {
  let number = 0n;
  for (const byte of publicKey.toReversed()) number = (number << 8n) | BigInt(byte);
  // X25519 ignores the highest bit of a public key (RFC 7748, section 5).
  return SMALL_ORDER.has(number & (2n ** 255n - 1n));
}

/** HKDF's salt, by which keys of one round and plan are unusable in another. */
export function roundSalt(roundId: string, planDigest: string): Bytes {
  if (!/^[0-9a-f]{32}$/.test(roundId) || !/^[0-9a-f]{64}$/.test(planDigest)) {
    throw new MessageError("a round id has 32 hexadecimal digits, a plan's digest 64");
  }
  return concat(label("secagg"), unhex(roundId), unhex(planDigest));
}

/** The clamped X25519 private key for the envelope from the member at `place` of the sorted cohort, from 0. */
export async function envelopePrivateKey(secret: Uint8Array, salt: Uint8Array, place: number): Promise<Bytes> {
  return clamp(await derive(secret, salt, concat(label("envelope-private"), uint32Bytes(place))));
}

/** The canonical form of an X25519 private key: X25519 fixes five of its bits (RFC 7748, section 5). */
export function clamp(secret: Uint8Array): Bytes {
  const clamped = new Uint8Array(secret);
  clamped[0] = (clamped[0] as number) & 248;
  clamped[31] = ((clamped[31] as number) & 127) | 64;
  return clamped;
}

/** AES-256-GCM key of the envelope from the owner of cipher key `sender` to that of envelope key `recipient`. */
export function envelopeKey(
  shared: Uint8Array,
  salt: Uint8Array,
  sender: Uint8Array,
  recipient: Uint8Array,
): Promise<Bytes> {
  return derive(shared, salt, concat(label("envelope"), sender, recipient));
}

/** AES-256-CTR key of the mask between the owners of mask keys `one` and `other`, in either order. */
export function pairwiseMaskKey(
  shared: Uint8Array,
  salt: Uint8Array,
  one: Uint8Array,
  other: Uint8Array,
): Promise<Bytes> {
  const [first, second] = compareBytes(one, other) <= 0 ? [one, other] : [other, one];
  return derive(shared, salt, concat(label("pairwise-mask"), first, second));
}

/** AES-256-CTR key of the self mask of the owner of `maskKey`, from its 32-byte seed. */
export function selfMaskKey(seed: Uint8Array, salt: Uint8Array, maskKey: Uint8Array): Promise<Bytes> {
  return derive(seed, salt, concat(label("self-mask"), maskKey));
}
