/** A Merkle tree over a device's public keys (archipel/protocol/secagg/key_tree.py). */

import { type Bytes, concat, label, sameBytes } from "../bytes.js";
import { digest } from "../crypto.js";
import { MessageError } from "../errors.js";

const BYTES = 32;
const LEAF = label("envelope-leaf");
const NODE = label("envelope-node");

/** The tree is filled up to a power of two, so that every path has the same length. */
export class KeyTree {
  private constructor(
    /** Of 32 bytes, one after the other. */
    readonly keys: Uint8Array,
    /** Level 0 has the leaves' hashes, the last level the root. */
    private readonly levels: readonly Bytes[],
  ) {}

  static readonly empty = new KeyTree(new Uint8Array(), [new Uint8Array(BYTES)]);

  /** Of `leaves` keys of 32 bytes, one after the other. Raises MessageError for another length. */
  static async of(keys: Uint8Array, leaves: number): Promise<KeyTree> {
    if (keys.length !== BYTES * leaves) {
      throw new MessageError(`envelope keys: expected ${leaves} of ${BYTES} bytes, got ${keys.length} bytes`);
    }
    const level = new Uint8Array(BYTES << depth(leaves));
    for (let at = 0; at < keys.length; at += BYTES) level.set(await hash(LEAF, keys.subarray(at, at + BYTES)), at);
    const levels = [level];
    for (let below: Uint8Array = level; below.length > BYTES; ) {
      const above = new Uint8Array(below.length / 2);
      for (let at = 0; at < above.length; at += BYTES) {
        above.set(await hash(NODE, below.subarray(2 * at, 2 * (at + BYTES))), at);
      }
      levels.push(above);
      below = above;
    }
    return new KeyTree(keys, levels);
  }

  get root(): Bytes {
    return this.levels.at(-1) as Bytes;
  }

  /** The public key at `index`, from 0. */
  key(index: number): Bytes {
    return new Uint8Array(this.keys.subarray(BYTES * index, BYTES * (index + 1)));
  }

  /** The siblings on the way from the leaf at `index` to the root, 32 bytes each. */
  path(index: number): Bytes {
    return concat(
      ...this.levels.slice(0, -1).map((level, height) => {
        // Two siblings differ in the lowest bit of their index.
        const start = BYTES * ((index >> height) ^ 1);
        return level.subarray(start, start + BYTES);
      }),
    );
  }
}

/** The number of siblings in a path. */
function depth(leaves: number): number {
  return 32 - Math.clz32(Math.max(leaves - 1, 0));
}

/** Whether `path` leads from `key` at `index` of `leaves` to `root`. */
export async function isUnder(
  root: Uint8Array,
  key: Uint8Array,
  index: number,
  path: Uint8Array,
  leaves: number,
): Promise<boolean> {
  if (index < 0 || index >= leaves || path.length !== BYTES * depth(leaves)) return false;
  let node: Bytes = await hash(LEAF, key);
  for (let at = 0, place = index; at < path.length; at += BYTES, place >>= 1) {
    const sibling = path.subarray(at, at + BYTES);
    // An odd index is the right one of its pair.
    node = await (place & 1 ? hash(NODE, sibling, node) : hash(NODE, node, sibling));
  }
  return sameBytes(node, root);
}

function hash(...parts: readonly Uint8Array[]): Promise<Bytes> {
  return digest(concat(...parts));
}
