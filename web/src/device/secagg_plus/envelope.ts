/**
 * Envelopes: a dealer's two shares for one holder, under AES-256-GCM, with commitments that the server keeps
 * (archipel/protocol/secagg_plus/envelope.py).
 *
 * What is in an envelope the server cannot read; what its holder must show later it can check against the commitments.
 */

import { type Bytes, concat, label, sameBytes, uint32Bytes, utf8 } from "../bytes.js";
import { agree, decrypt, encrypt } from "../crypto.js";
import { ShareError } from "../errors.js";
import { envelopeKey as deriveKey } from "../secagg/keys.js";
import { ENVELOPE_BYTES } from "./messages.js";
import { checkShare, commit, SHARE_BYTES } from "./shares.js";

export const NONCE_BYTES = 12;
const ENVELOPE = label("envelope", 2);
// The kind is a part of what is bound: a share of the one cannot be shown as a share of the other.
const [MASK_KEY, SEED] = [utf8("mask key"), utf8("seed")];

/** The share of a mask key, and the share of a seed. */
export interface Pair {
  readonly maskKey: Bytes;
  readonly seed: Bytes;
}

/** The envelope. `key` serves one dealer and one holder, who are named by their places; `nonce` is 12 random bytes. */
export async function seal(
  key: Uint8Array,
  bound: Uint8Array,
  dealer: number,
  holder: number,
  pair: Pair,
  nonce: Uint8Array,
): Promise<Bytes> {
  const plain = concat(pair.maskKey, pair.seed);
  return concat(nonce, await encrypt(key, nonce, plain, associated(bound, dealer, holder)));
}

/**
 * The two shares, of `dealt` (an envelope and its commitments) to the holder at `position` of its dealer's. Raises
 * ShareError when the envelope does not open, or when the commitments are to other shares.
 */
export async function unseal(
  key: Uint8Array,
  bound: Uint8Array,
  dealer: number,
  holder: number,
  position: number,
  dealt: Uint8Array,
): Promise<Pair> {
  const [envelope, commitments] = [dealt.subarray(0, ENVELOPE_BYTES), dealt.subarray(ENVELOPE_BYTES)];
  const [nonce, sealed] = [envelope.subarray(0, NONCE_BYTES), envelope.subarray(NONCE_BYTES)];
  const plain = await decrypt(key, nonce, sealed, associated(bound, dealer, holder));
  if (plain === null) throw new ShareError(`shares from place ${dealer}: they do not decrypt`);
  const pair = { maskKey: plain.slice(0, SHARE_BYTES), seed: plain.slice(SHARE_BYTES) };
  checkShare(pair.maskKey);
  checkShare(pair.seed);
  if (!sameBytes(await commitPair(bound, dealer, position, pair), commitments)) {
    throw new ShareError(`shares from place ${dealer}: its commitments are to other shares`);
  }
  return pair;
}

/** The commitments to both shares, in the order of the pair. */
export async function commitPair(bound: Uint8Array, dealer: number, position: number, pair: Pair): Promise<Bytes> {
  return concat(
    await commit(dealer, position, pair.maskKey, concat(bound, MASK_KEY)),
    await commit(dealer, position, pair.seed, concat(bound, SEED)),
  );
}

/** The key of the envelope from the owner of cipher key `dealer` to that of `holder`; either of them derives it. */
export async function envelopeKey(
  own: CryptoKey,
  peer: Uint8Array,
  salt: Uint8Array,
  dealer: Uint8Array,
  holder: Uint8Array,
): Promise<Bytes> {
  return deriveKey(await agree(own, peer), salt, dealer, holder);
}

function associated(bound: Uint8Array, dealer: number, holder: number): Bytes {
  // Both places: the server cannot pass an envelope off as another dealer's, of whom it then asks for another secret.
  return concat(ENVELOPE, bound, uint32Bytes(dealer), uint32Bytes(holder));
}
