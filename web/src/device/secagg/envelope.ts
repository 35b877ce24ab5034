/** Envelopes: two shares from one participant to another under AES-256-GCM (archipel/protocol/secagg/envelope.py). */

import { type Bytes, concat, label, unhex } from "../bytes.js";
import { decrypt, encrypt, sign, type SigningKey, verifies } from "../crypto.js";
import { CertificateError, ShareError } from "../errors.js";
import type { Shares } from "../messages/secure.js";
import type { Session } from "./session.js";
import { decodeShare, SHARE_BYTES } from "./shamir.js";

export const NONCE_BYTES = 12;
/** 16 bytes for the tag of AES-GCM. */
export const ENVELOPE_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + 16;

/** A peer's shares of its mask key and of its self-mask seed. */
export interface HeldShares {
  readonly maskKey: Bytes;
  readonly seed: Bytes;
}

/** The bytes that an envelope is bound to. `cohort` is the digest of U1. */
export function associatedData(roundId: string, cohort: string, sender: string, recipient: string): Bytes {
  return concat(label("envelope"), unhex(roundId + cohort + sender + recipient));
}

/** Nonce, ciphertext, tag. `nonce` is 12 random bytes. */
export async function sealShares(
  key: Uint8Array,
  nonce: Uint8Array,
  shares: HeldShares,
  associated: Uint8Array,
): Promise<Bytes> {
  return concat(nonce, await encrypt(key, nonce, concat(shares.maskKey, shares.seed), associated));
}

/** Raises ShareError that names the sender. */
export async function openShares(
  key: Uint8Array,
  ciphertext: Uint8Array,
  associated: Uint8Array,
  sender: string,
): Promise<HeldShares> {
  if (ciphertext.length !== ENVELOPE_BYTES) {
    throw new ShareError(`shares from ${sender}: expected ${ENVELOPE_BYTES} bytes, got ${ciphertext.length}`, [sender]);
  }
  const plain = await decrypt(key, ciphertext.subarray(0, NONCE_BYTES), ciphertext.subarray(NONCE_BYTES), associated);
  if (plain === null) throw new ShareError(`shares from ${sender}: they do not decrypt`, [sender]);
  const shares = { maskKey: plain.slice(0, SHARE_BYTES), seed: plain.slice(SHARE_BYTES) };
  try {
    decodeShare(shares.maskKey);
    decodeShare(shares.seed);
  } catch (error) {
    throw new ShareError(`shares from ${sender}: ${(error as Error).message}`, [sender]);
  }
  return shares;
}

export function signEnvelope(key: SigningKey, ciphertext: Uint8Array, associated: Uint8Array): Promise<Bytes> {
  return sign(key, concat(associated, ciphertext));
}

/** Raises ShareError unless the inbox has one envelope at most of each other member of the session. */
export function checkSenders(inbox: Shares, own: string, session: Session): void {
  const seen = new Set([own]);
  for (const { peer: sender } of inbox.shares) {
    if (!session.peers.has(sender) || sender === own) {
      throw new ShareError(`inbox: shares from ${sender}, which is not a peer in this cohort`, [sender]);
    }
    // A second envelope would replace the shares of the first.
    if (seen.has(sender)) throw new ShareError(`inbox: shares from ${sender} twice`, [sender]);
    seen.add(sender);
  }
}

/** Raises CertificateError, which blames nobody: the server can garble what the sender signed. */
export async function checkSignature(
  deviceKey: Uint8Array,
  signature: Uint8Array,
  ciphertext: Uint8Array,
  associated: Uint8Array,
  sender: string,
): Promise<void> {
  if (await verifies(deviceKey, signature, concat(associated, ciphertext))) return;
  throw new CertificateError(
    `shares from ${sender}: the signature does not verify; the shares were tampered with on the way, or the server ` +
      "showed the sender another cohort",
  );
}
