/**
 * Every error that the library raises on purpose; the names are those of the Python package.
 *
 * ArchipelError
 * ├── BundleError                   a bundle is not what it says it is
 * │   ├── ArchiveError              the .bundle file is not a plain, uncompressed zip of known members
 * │   ├── ManifestError             the manifest cannot be decoded or contradicts itself
 * │   │   ├── UnknownVersionError   a format version this library does not know
 * │   │   └── UnknownRoleError      a program's input or output has a role this library does not know
 * │   ├── SignatureError            no trusted key signed the manifest
 * │   ├── DigestError               bytes differ from their SHA-256
 * │   ├── UnsafePathError           a file name that is not plain, or a file that the manifest does not list
 * │   ├── UnsafeGraphError          a graph reads other files, uses other operators, or is not what ONNX writes
 * │   └── TensorLayoutError         a tensor that is too large, misaligned, overlapping or missing
 * ├── RuntimeInputError             the caller's array does not fit the program's input
 * ├── RuntimeLimitError             a program needs more than its owner allows
 * ├── RuntimeProgramError           a bundle asks for what this runtime does not do
 * ├── CheckpointError               a fit cannot go on from its checkpoint, or cannot write one
 * ├── SelfTestError                 a model does not answer as its bundle says it must
 * ├── NonFiniteLossError            training diverged: the loss or a weight is infinite or not a number
 * └── StorageError                  the browser's storage cannot be used, or holds something else
 *     └── NoStorageError            the browser lets this page keep nothing
 */

/** Root of everything raised on purpose. Its text says what was expected, what came, and what to do. */
export class ArchipelError extends Error {
  override name = "ArchipelError";
}

export class BundleError extends ArchipelError {
  override name = "BundleError";
}

export class ArchiveError extends BundleError {
  override name = "ArchiveError";
}

export class ManifestError extends BundleError {
  override name = "ManifestError";
}

export class UnknownVersionError extends ManifestError {
  override name = "UnknownVersionError";
}

export class UnknownRoleError extends ManifestError {
  override name = "UnknownRoleError";
}

export class SignatureError extends BundleError {
  override name = "SignatureError";
}

export class DigestError extends BundleError {
  override name = "DigestError";
}

export class UnsafePathError extends BundleError {
  override name = "UnsafePathError";
}

export class UnsafeGraphError extends BundleError {
  override name = "UnsafeGraphError";
}

export class TensorLayoutError extends BundleError {
  override name = "TensorLayoutError";
}

export class RuntimeInputError extends ArchipelError {
  override name = "RuntimeInputError";
}

export class RuntimeLimitError extends ArchipelError {
  override name = "RuntimeLimitError";
}

export class RuntimeProgramError extends ArchipelError {
  override name = "RuntimeProgramError";
}

export class CheckpointError extends ArchipelError {
  override name = "CheckpointError";
}

export class SelfTestError extends ArchipelError {
  override name = "SelfTestError";
}

export class NonFiniteLossError extends ArchipelError {
  override name = "NonFiniteLossError";
}

export class StorageError extends ArchipelError {
  override name = "StorageError";
}

export class NoStorageError extends StorageError {
  override name = "NoStorageError";
}

const CLASSES: readonly (new (message: string) => ArchipelError)[] = [
  ArchipelError,
  BundleError,
  ArchiveError,
  ManifestError,
  UnknownVersionError,
  UnknownRoleError,
  SignatureError,
  DigestError,
  UnsafeGraphError,
  UnsafePathError,
  TensorLayoutError,
  RuntimeInputError,
  RuntimeLimitError,
  RuntimeProgramError,
  CheckpointError,
  SelfTestError,
  NonFiniteLossError,
  StorageError,
  NoStorageError,
];

/** The error of that class name, as it was on the other side of a worker; a plain Error for names that are not ours. */
export function errorOf(name: string, message: string): Error {
  const known = CLASSES.find((each) => new each("").name === name);
  if (known !== undefined) return new known(message);
  const error = new Error(message);
  error.name = name;
  return error;
}
