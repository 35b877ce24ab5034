/** SHA-256 by the browser. */

import { SignatureError } from "../errors.js";

/** SHA-256 in 64 hexadecimal digits. */
export async function sha256(data: Uint8Array): Promise<string> {
  return hex(new Uint8Array(await webCrypto().digest("SHA-256", data as Uint8Array<ArrayBuffer>)));
}

export function hex(bytes: Uint8Array): string {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Raises SignatureError where browsers have none. */
export function webCrypto(): SubtleCrypto {
  const subtle = globalThis.crypto?.subtle;
  if (subtle === undefined) {
    throw new SignatureError(
      "WebCrypto is missing, so nothing can be verified; serve the page over HTTPS or localhost",
    );
  }
  return subtle;
}
