/**
 * A member of a cohort as the others see it: who it is, and the public keys that it made for the round
 * (archipel/protocol/secagg_plus/member.py).
 */

import { hex } from "../../bundle/digests.js";
import { type Bytes, concat, label, sameBytes } from "../bytes.js";
import { digest, sign, type SigningKey, verifies } from "../crypto.js";
import { CertificateError, ConsistencyError, SecureAggregationError } from "../errors.js";
import { type VerifiedDevice, verifyChain } from "../identity.js";
import { MAX_ROTATIONS } from "../messages/fields.js";
import type { Chain, Sealed } from "../messages/identity.js";
import { requireMember, type Revoked } from "../revocations.js";
import { isSmallOrder } from "../secagg/keys.js";
import { bytes, listOf, named, pack, row, unpack } from "./msgpack.js";
import { type Session, sessionBytes } from "./session.js";

export const MAX_MEMBER_BYTES = 8192;
const KEY_BYTES = 32;
const ROUND_KEYS_BYTES = 3 * KEY_BYTES;
const [ROUND_KEYS, SEED] = [label("round-keys", 2), label("seed", 2)];

/** What a device publishes for one round: two X25519 keys, and what commits to the seed of its own mask. */
export interface RoundKeys {
  readonly cipherKey: Bytes;
  readonly maskKey: Bytes;
  readonly seedDigest: Bytes;
}

/** `keys` are those of `RoundKeys`, `signature` is the device key's, over the round, the plan and them. */
interface Member {
  readonly chain: Chain;
  readonly keys: Bytes;
  readonly signature: Bytes;
}

const sealed = named<Sealed>({ body: bytes(MAX_MEMBER_BYTES), signature: bytes(MAX_MEMBER_BYTES) });
const member = row<Member>({
  chain: named<Chain>({ token: sealed, identity: sealed, rotations: listOf(sealed, MAX_ROTATIONS) }, ["rotations"]),
  keys: bytes(ROUND_KEYS_BYTES, ROUND_KEYS_BYTES),
  signature: bytes(64, 64),
});

/** The bytes that stand for the device in this round; `keys` as `joinKeys` gives them. */
export async function signMember(
  session: Session,
  keys: Bytes,
  chain: Chain,
  identity: SigningKey,
): Promise<Bytes> {
  return pack({ chain, keys, signature: await sign(identity, signed(session, keys)) }, member);
}

/**
 * Who a member (of MAX_MEMBER_BYTES at most) is and its keys, once its certificates and its signature are verified. Raises MessageError,
 * CertificateError, or SecureAggregationError for keys that give no secret.
 */
export async function readMember(
  encoded: Uint8Array,
  session: Session,
  enrolmentKey: Uint8Array,
  population: string,
  revoked: Revoked,
): Promise<{ device: VerifiedDevice; keys: RoundKeys }> {
  const { chain, keys, signature } = unpack("member", encoded, member);
  const device = await verifyChain(chain, enrolmentKey, { population });
  await requireMember(revoked, device);
  if (!(await verifies(device.deviceKey, signature, signed(session, keys)))) {
    throw new CertificateError(`member ${device.deviceId}: the signature of its round keys does not verify`);
  }
  return { device, keys: usableKeys(keys, device.deviceId) };
}

/** What a device commits to its seed with. A seed is 32 random bytes, so its hash needs no salt. */
export function seedDigest(seed: Uint8Array, session: Session): Promise<Bytes> {
  return digest(concat(SEED, sessionBytes(session), seed));
}

export function joinKeys({ cipherKey, maskKey, seedDigest }: RoundKeys): Bytes {
  return concat(cipherKey, maskKey, seedDigest);
}

export function splitKeys(encoded: Bytes): RoundKeys {
  const [cipherKey, maskKey] = [encoded.slice(0, KEY_BYTES), encoded.slice(KEY_BYTES, 2 * KEY_BYTES)];
  return { cipherKey, maskKey, seedDigest: encoded.slice(2 * KEY_BYTES) };
}

/** Refuses a device, an enrolment token or a key that occurs twice, so that one device cannot count as many. */
export class Distinct {
  private readonly seen = new Set<string>();

  /** Raises ConsistencyError, which names what occurs twice. */
  add(device: VerifiedDevice, keys: RoundKeys): void {
    this.addOne("device", device.deviceId);
    this.addOne("device key", hex(device.deviceKey));
    this.addOne("enrolment token", hex(device.tokenKey));
    // In one set: nobody's cipher key may be another's mask key, which the server may reconstruct.
    this.addOne("round key", hex(keys.cipherKey));
    this.addOne("round key", hex(keys.maskKey));
  }

  private addOne(what: string, value: string): void {
    const named = `${what} ${value}`;
    if (this.seen.has(named)) throw new ConsistencyError(`cohort: ${what} ${value.slice(0, 16)}... occurs twice`);
    this.seen.add(named);
  }
}

function usableKeys(encoded: Bytes, name: string): RoundKeys {
  const keys = splitKeys(encoded);
  // When a device leaves, the server reconstructs its mask key. Were that its cipher key too, the server could open the
  // envelopes to it.
  if (sameBytes(keys.cipherKey, keys.maskKey)) {
    throw new SecureAggregationError(`member ${name}: its cipher key and its mask key must differ`);
  }
  for (const [what, key] of [["cipher key", keys.cipherKey], ["mask key", keys.maskKey]] as const) {
    if (isSmallOrder(key)) {
      throw new SecureAggregationError(`member ${name}: its ${what} is an X25519 public key of small order`);
    }
  }
  return keys;
}

function signed(session: Session, keys: Bytes): Bytes {
  return concat(ROUND_KEYS, sessionBytes(session), keys);
}
