/** Signed statements: bytes, and an Ed25519 signature over a label and those bytes (archipel/protocol/sealed.py). */

import type { Decoder } from "../bundle/decoders.js";
import { hex } from "../bundle/digests.js";
import { type Bytes, concat, label as labelBytes } from "./bytes.js";
import { digest, sign, type SigningKey, verifies } from "./crypto.js";
import { CertificateError, MessageError } from "./errors.js";
import { decode, encode } from "./messages/fields.js";
import { MAX_BODY_BYTES, type Sealed } from "./messages/identity.js";

/** The statement as JSON, signed for the purpose `label`. */
export async function seal(label: string, statement: object, key: SigningKey): Promise<Sealed> {
  const body = encode(statement);
  return { body, signature: await sign(key, signedBytes(label, body)) };
}

/** The statement, verified and then decoded strictly. Raises CertificateError or MessageError. */
export async function unseal<T>(
  label: string,
  sealed: Sealed,
  publicKey: Uint8Array,
  decoder: Decoder<T>,
  limit = MAX_BODY_BYTES,
): Promise<T> {
  // Cheapest first: a body is neither hashed before its size is known nor parsed before its signature is.
  if (sealed.body.length > limit) {
    throw new MessageError(`${label}: body of ${sealed.body.length} bytes, the limit is ${limit}`);
  }
  if (!(await verifies(publicKey, sealed.signature, signedBytes(label, sealed.body)))) {
    const start = hex(publicKey.subarray(0, 8));
    throw new CertificateError(`${label}: the signature does not verify with key ${start}...`);
  }
  return decode(label, sealed.body, decoder);
}

/** SHA-256 (hex) of the signed bytes; of a plan it is what devices bind their messages of the round to. */
export async function bodyDigest(sealed: Sealed): Promise<string> {
  return hex(await digest(sealed.body));
}

function signedBytes(label: string, body: Bytes): Bytes {
  return concat(labelBytes(label), body);
}
