/** Open a bundle: nothing of it is believed before its signature and every digest were checked. */

import type { NdArray } from "../arrays.js";
import { bytesOf, sameDims } from "../arrays.js";
import { BundleError, DigestError, SignatureError, TensorLayoutError, UnsafePathError } from "../errors.js";
import { unpack } from "./archive.js";
import { inspectGraph } from "./graphs/inspection.js";
import { hex, sha256, webCrypto } from "./digests.js";
import { decodeManifest, type Manifest, MANIFEST_FILE, SIGNATURE_FILE, WEIGHTS_FILE } from "./manifest.js";
import type { Program } from "./roles.js";
import { readWeights } from "./weights.js";

/** A verified bundle in memory. `digest` (hex) is the SHA-256 of its manifest's bytes, and so of all that it holds. */
export class Bundle {
  constructor(
    readonly manifest: Manifest,
    readonly digest: string,
    private readonly files: ReadonlyMap<string, Uint8Array>,
    /** Every tensor of weights.safetensors: views of its bytes, not to be written to. */
    readonly tensors: ReadonlyMap<string, NdArray>,
    /** The public key that signed the manifest, in hexadecimal digits. */
    readonly publisher: string,
  ) {}

  tensor(name: string): NdArray {
    const array = this.tensors.get(name);
    if (array === undefined) {
      throw new TensorLayoutError(`bundle ${this.manifest.name}: no tensor ${name} in ${WEIGHTS_FILE}`);
    }
    return array;
  }

  /** The global model as it was published, in the manifest's order. */
  parameters(): Map<string, NdArray> {
    return new Map(this.manifest.parameters.map((spec) => [spec.name, this.tensor(spec.name)]));
  }

  program(name: string): Program {
    const program = this.manifest.programs[name];
    if (program === undefined) {
      const there = Object.keys(this.manifest.programs).sort().join(", ") || "none";
      throw new BundleError(`bundle ${this.manifest.name} has no program ${name}; it has: ${there}`);
    }
    return program;
  }

  file(name: string): Uint8Array {
    const data = this.files.get(name);
    if (data === undefined) throw new BundleError(`bundle ${this.manifest.name} has no file ${name}`);
    return data;
  }

  /** The bytes that graphs refer to as external data; undefined in a bundle without weights. */
  get weights(): Uint8Array | undefined {
    return this.files.get(WEIGHTS_FILE);
  }
}

/**
 * Open a `.bundle` file's bytes and verify it with one of `trustedKeys` (raw 32-byte Ed25519 public keys).
 *
 * A development key, whose SHA-256 begins with 16 zero bits, counts only with `allowDevelopment`. Raises the BundleError that says what is wrong.
 */
export async function openBundle(
  file: Uint8Array,
  trustedKeys: readonly Uint8Array[],
  allowDevelopment = false,
): Promise<Bundle> {
  // Copies: what is verified here must not change afterwards, and tensors are to start at aligned addresses.
  const members = new Map(Array.from(unpack(file), ([name, data]) => [name, data.slice()]));
  const manifestBytes = members.get(MANIFEST_FILE) ?? new Uint8Array();
  const signature = members.get(SIGNATURE_FILE) ?? new Uint8Array();
  const publisher = await verifySignature(manifestBytes, signature, trustedKeys, allowDevelopment);
  const manifest = decodeManifest(manifestBytes);
  for (const name of members.keys()) {
    if (name !== MANIFEST_FILE && name !== SIGNATURE_FILE && manifest.files[name] === undefined) {
      throw new UnsafePathError(`bundle: ${name} is not in the manifest`);
    }
  }
  for (const [name, digest] of Object.entries(manifest.files)) {
    const data = members.get(name);
    if (data === undefined) throw new DigestError(`bundle: ${name} is missing, but the manifest lists it`);
    const actual = await sha256(data);
    if (actual !== digest) {
      throw new DigestError(`bundle: ${name}: SHA-256 is ${actual}, the manifest says ${digest}; fetch it again`);
    }
  }
  const weights = members.get(WEIGHTS_FILE);
  const tensors = weights === undefined ? new Map<string, NdArray>() : readWeights(weights);
  const bundle = new Bundle(manifest, await sha256(manifestBytes), members, tensors, publisher);
  await checkParameters(bundle);
  const files = new Map(Object.entries(manifest.programs).map(([name, program]) => [program.file, name]));
  for (const [file, name] of files) {
    inspectGraph(name, bundle.file(file), { name: WEIGHTS_FILE, bytes: weights?.length ?? 0 });
  }
  return bundle;
}

/** The key, in hexadecimal digits, that signed these bytes. Raises SignatureError unless one did and is no development key, or these are allowed. */
export async function verifySignature(
  manifest: Uint8Array,
  signature: Uint8Array,
  trustedKeys: readonly Uint8Array[],
  allowDevelopment = false,
): Promise<string> {
  if (!trustedKeys.length) throw new SignatureError("bundle: no trusted keys given, so nothing can be verified");
  const subtle = webCrypto();
  for (const key of trustedKeys) {
    if (key.length !== 32) {
      throw new SignatureError(`trusted key: expected the 32 bytes of an Ed25519 public key, got ${key.length}`);
    }
    let imported: CryptoKey;
    try {
      imported = await subtle.importKey("raw", key as Uint8Array<ArrayBuffer>, "Ed25519", false, ["verify"]);
    } catch (error) {
      if (error instanceof Error && error.name === "NotSupportedError") {
        throw new SignatureError("this browser cannot verify Ed25519 signatures; update it");
      }
      // Not a point of the curve: no signature is valid under it.
      continue;
    }
    const [message, proof] = [manifest as Uint8Array<ArrayBuffer>, signature as Uint8Array<ArrayBuffer>];
    if (!(await subtle.verify("Ed25519", imported, proof, message))) continue;
    if (!allowDevelopment && (await sha256(key)).startsWith("0000")) {
      throw new SignatureError("bundle: signed with a development key; sign it with a real one, or allowDevelopment");
    }
    return hex(key);
  }
  throw new SignatureError(`bundle: none of the ${trustedKeys.length} trusted keys signed this manifest`);
}

async function checkParameters(bundle: Bundle): Promise<void> {
  for (const spec of bundle.manifest.parameters) {
    const array = bundle.tensor(spec.name);
    if (array.dtype !== spec.dtype || !sameDims(array.dims, spec.shape)) {
      throw new TensorLayoutError(
        `parameter ${spec.name}: ${WEIGHTS_FILE} holds ${array.dtype}[${array.dims}], ` +
          `the manifest says ${spec.dtype}[${spec.shape}]`,
      );
    }
    if ((await sha256(bytesOf(array))) !== spec.sha256) {
      throw new DigestError(`parameter ${spec.name}: its bytes differ from the manifest's SHA-256`);
    }
  }
}
