/**
 * Errors of a device; the names are those of the Python package.
 *
 * ArchipelError
 * ├── ProtocolError                 a message or a round is not what the protocol asks for
 * │   ├── MessageError              a message cannot be decoded
 * │   ├── CertificateError          a signature or a chain of certificates does not verify
 * │   ├── PolicyError               a plan is outside the policy that the publisher signed
 * │   │   └── ProvenanceError       a round's weights do not come from where they must come from
 * │   ├── BoundError                an update is beyond the bounds that the manifest states
 * │   └── SecureAggregationError    a step of a secure round failed
 * │       ├── ShareError            shares are missing or do not fit
 * │       ├── ThresholdError        too few devices
 * │       └── ConsistencyError      devices were told different things
 * └── ClientError                   the device itself: not enrolled, its storage damaged, ...
 *     ├── OwnerRefusalError         the owner's limits exclude it; `code` is what the server may be told
 *     ├── RefusedError              the server answered with an error status
 *     │   └── SessionRefusedError   the server does not let this device open a session
 *     ├── UnreachableError          no attempt brought an answer
 *     ├── TooLargeError             an answer is larger than the device takes
 *     ├── RoundAbandonedError       the device leaves the round
 *     └── OtherTabError             another tab of this profile is the device now
 */

import { ArchipelError, errorOf as errorOfRuntime } from "../errors.js";

export class ProtocolError extends ArchipelError {
  override name = "ProtocolError";
}

export class MessageError extends ProtocolError {
  override name = "MessageError";
}

export class CertificateError extends ProtocolError {
  override name = "CertificateError";
}

export class PolicyError extends ProtocolError {
  override name = "PolicyError";
}

export class BoundError extends ProtocolError {
  override name = "BoundError";
}

export class ProvenanceError extends PolicyError {
  override name = "ProvenanceError";
}

export class SecureAggregationError extends ProtocolError {
  override name = "SecureAggregationError";
}

export class ShareError extends SecureAggregationError {
  override name = "ShareError";

  constructor(
    message: string,
    /** The devices to blame, where they are known. */
    readonly devices: readonly string[] = [],
  ) {
    super(message);
  }
}

export class ThresholdError extends SecureAggregationError {
  override name = "ThresholdError";
}

export class ConsistencyError extends SecureAggregationError {
  override name = "ConsistencyError";
}

export class ClientError extends ArchipelError {
  override name = "ClientError";
}

export class OwnerRefusalError extends ClientError {
  override name = "OwnerRefusalError";

  constructor(
    message: string,
    /** Which kind of limit, as the server may be told. */
    readonly code: string = "other",
  ) {
    super(message);
  }
}

export class RefusedError extends ClientError {
  override name = "RefusedError";

  constructor(
    message: string,
    readonly status: number = 0,
    /** Seconds that the server asks for, null where it does not. */
    readonly retryAfter: number | null = null,
  ) {
    super(message);
  }
}

export class SessionRefusedError extends RefusedError {
  override name = "SessionRefusedError";
}

export class UnreachableError extends ClientError {
  override name = "UnreachableError";
}

export class TooLargeError extends ClientError {
  override name = "TooLargeError";
}

export class RoundAbandonedError extends ClientError {
  override name = "RoundAbandonedError";
}

export class OtherTabError extends ClientError {
  override name = "OtherTabError";
}

const CLASSES: readonly (new (message: string) => ArchipelError)[] = [
  ProtocolError, MessageError, CertificateError, PolicyError, BoundError, ProvenanceError, SecureAggregationError,
  ShareError, ThresholdError, ConsistencyError, ClientError, OwnerRefusalError, RefusedError, SessionRefusedError,
  UnreachableError, TooLargeError, RoundAbandonedError, OtherTabError,
];

/** The error of that class name, as it was on the other side of a worker. */
export function errorOf(name: string, message: string): Error {
  const known = CLASSES.find((each) => new each("").name === name);
  return known === undefined ? errorOfRuntime(name, message) : new known(message);
}
