/** An update on its way: large ones go up in parts, so that a connection that breaks costs one of them. */

import type { Bytes } from "../bytes.js";
import { RefusedError } from "../errors.js";
import { receipt, updateParts } from "../messages/rounds.js";
import type { DeviceSession } from "./session.js";

/** Bytes of a part; the last one has what is left. The server wants exactly so many. */
const PART_BYTES = 1 << 20;
/** Longer updates are uploaded in parts. */
const WHOLE_BYTES = 8 << 20;

export interface Sizes {
  readonly whole: number;
  readonly part: number;
}

/**
 * Upload the update; the same bytes may be sent again. Of one that goes up in parts only those are sent that the server
 * does not have yet, and `answered` is called after each, which over a slow link is long before the end. Raises
 * RefusedError, UnreachableError.
 */
export async function sendUpdate(
  session: DeviceSession,
  roundId: string,
  data: Bytes,
  digest: string,
  answered: () => void = () => {},
  { whole, part }: Sizes = { whole: WHOLE_BYTES, part: PART_BYTES },
): Promise<void> {
  const headers = { "Content-Type": "application/octet-stream", "Digest-SHA256": digest };
  const url = `/v1/rounds/${roundId}/update`;
  const inParts = data.length > whole && (await sendParts(session, `${url}/parts`, data, headers, answered, part));
  // Without a body the request stands for the parts.
  await session.call("PUT", url, receipt, inParts ? new Uint8Array() : data, headers);
}

/** Upload what the server does not have yet; false if it takes no parts. */
async function sendParts(
  session: DeviceSession,
  url: string,
  data: Bytes,
  headers: Readonly<Record<string, string>>,
  answered: () => void,
  size: number,
): Promise<boolean> {
  let held: ReadonlySet<number>;
  try {
    held = new Set((await session.call("GET", url, updateParts)).held);
  } catch (error) {
    // An older server.
    if (error instanceof RefusedError && error.status === 404) return false;
    throw error;
  }
  for (let start = 0, number = 1; start < data.length; start += size, number++) {
    if (held.has(number)) continue;
    await session.call("PUT", `${url}/${number}`, receipt, data.subarray(start, start + size), headers);
    answered();
  }
  return true;
}
