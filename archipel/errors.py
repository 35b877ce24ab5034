"""Every error that archipel raises on purpose.

ArchipelError
├── MissingExtraError             an optional dependency is not installed
├── LockedError                   another process holds the lock on a file
├── DatasetError                  a data file cannot be read
├── CatalogueError                no network of that name
├── BundleError                   a bundle is damaged, unsigned, or contradicts its manifest
│   ├── ArchiveError              the .bundle file is not a plain, uncompressed zip of known members
│   ├── ManifestError             the manifest cannot be decoded or contradicts itself
│   │   ├── UnknownVersionError   a format version this installation does not know
│   │   └── UnknownRoleError      a program's input or output has a role this installation does not know
│   ├── SignatureError            no trusted key signed the manifest
│   │   └── DevelopmentKeyError   a development key did, and whoever opens the bundle allows none
│   ├── DigestError               bytes differ from their SHA-256
│   ├── UnsafePathError           a path that leaves the bundle
│   ├── UnsafeGraphError          a graph reads other files, uses other operators, or is not what ONNX writes
│   ├── TensorLayoutError         a tensor that is too large, misaligned, overlapping or missing
│   └── CardError                 the model card is not well formed
├── ProtocolError                 messages between server and devices
│   ├── MessageError              a message cannot be decoded
│   ├── CertificateError          an enrolment chain or a signature does not verify
│   ├── PolicyError               a plan outside the publisher's privacy policy
│   │   └── ProvenanceError       the server cannot show where weights come from
│   ├── BoundError                an update or a sum that no device running its signed program sends
│   └── SecureAggregationError    a secure round must not go on
│       ├── ThresholdError        fewer participants than the threshold
│       ├── ConsistencyError      participants were told different survivor sets
│       └── ShareError            a secret share is missing, foreign or tampered with
│           └── DealtSharesError  a dealer's shares are of no secret
├── GraphError                    an ONNX graph is invalid or unsupported
│   ├── ModelImportError          a source model cannot become a Model
│   ├── FunctionError             a Python function cannot become a graph
│   ├── PreprocessingError        transforms of raw inputs are wrong, or do not fit the model
│   └── AutodiffError             a gradient cannot be built
│       ├── MissingRuleError      no gradient rule for an operator
│       └── NotDifferentiableError  no gradient exists along the path asked for
├── TrainingError                 a training step cannot be built or run
│   ├── MissingLoweringError      PyTorch has no form of an operator
│   └── NotANumberError           a graph that runs node by node has computed NaN
├── CompressionError              a recipe cannot be applied
├── ConversionError               a bundle cannot be made
├── RuntimeInputError             the caller's array does not fit the program's input
├── RuntimeLimitError             a program needs more memory than the device's owner allows
├── RuntimeProgramError           a bundle needs a program or feature that the runtime or the bundle lacks
│   └── IndexRangeError           a label, class or token number in the data is none that the model has
├── DelegateError                 the requested execution provider is unknown, missing or fails
├── CheckpointError               a fit cannot resume from its checkpoint, or cannot write one
├── SelfTestError                 a model's outputs differ from those that its bundle states
├── SlotError                     a folder of model slots cannot be used, or not in its present state
├── NonFiniteLossError            training diverged: the loss or a weight is infinite or not a number
├── SimulationError               a federation cannot be simulated so, or not be tuned
├── InsightError                  a page about a model or a run cannot be made
├── StoreError                    an example store cannot be opened, read or written
│   ├── StoreKeyError             the key does not open the store, or the key file is missing
│   ├── StoreErasedError          the store was erased
│   ├── StoreRecordError          an example is missing, damaged or tampered with
│   ├── StoreQuotaError           the examples to add are larger than the whole quota
│   └── StoreBusyError            another process is writing
├── TlsError                      a certificate or key for TLS cannot be used
├── ServerError                   the server cannot start or continue
│   ├── EligibilityError          an expression over devices' attributes cannot be parsed
│   ├── AuditError                the audit log was tampered with
│   ├── LeaseLostError            another coordinator has taken over
│   ├── SpoiledRoundError         the updates of a round's devices contradict each other
│   └── RefusalError              the server refuses a request, which has changed nothing
│       ├── InvalidRequestError   the request is not possible
│       ├── ForbiddenError        the sender may not do this
│       ├── NotFoundError         the thing that it names does not exist, or the sender may not see it
│       ├── ConflictError         the request contradicts what is stored
│       ├── GoneError             the request comes too late
│       └── ApiError              the web application refuses it, with an HTTP status
├── ClientError                   the agent or the operator's client cannot continue
│   ├── OwnerRefusalError         the device's owner does not allow the round
│   ├── TooLargeError             the server sends more than the device accepts
│   ├── UnreachableError          the server did not answer
│   ├── RefusedError              the server answered with an error
│   │   └── SessionRefusedError   it does not accept this device's key, or has revoked the device
│   └── RoundAbandonedError       the device left the round, cleanly
└── CommandError                  a command's arguments or files cannot be used
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ArchipelError(Exception):
    """Root of all errors that archipel raises on purpose. The text says what was expected, what came, and a remedy."""


class MissingExtraError(ArchipelError):
    """An optional dependency is not installed; the text names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; install it with: pip install 'archipel[{extra}]'")
        self.package = package
        self.extra = extra


class LockedError(ArchipelError): ...


class DatasetError(ArchipelError): ...


class CatalogueError(ArchipelError): ...


class BundleError(ArchipelError): ...


class ArchiveError(BundleError): ...


class ManifestError(BundleError): ...


class UnknownVersionError(ManifestError): ...


class UnknownRoleError(ManifestError): ...


class SignatureError(BundleError): ...


class DevelopmentKeyError(SignatureError):
    """A development key signed the bundle, and whoever opens it does not allow such keys."""


class DigestError(BundleError): ...


class UnsafePathError(BundleError): ...


class UnsafeGraphError(BundleError): ...


class TensorLayoutError(BundleError): ...


class CardError(BundleError): ...


class ProtocolError(ArchipelError): ...


class MessageError(ProtocolError): ...


class CertificateError(ProtocolError): ...


class PolicyError(ProtocolError): ...


class ProvenanceError(PolicyError): ...


class BoundError(ProtocolError): ...


class SecureAggregationError(ProtocolError): ...


class ThresholdError(SecureAggregationError): ...


class ConsistencyError(SecureAggregationError): ...


class ShareError(SecureAggregationError):
    """`devices` are the ids of the devices whose shares are wrong, as far as that is known."""

    def __init__(self, message: str, devices: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.devices = tuple(devices)


class DealtSharesError(ShareError):
    """The `devices` dealt shares that give no secret, to holders who all show what they were dealt."""


class GraphError(ArchipelError): ...


class ModelImportError(GraphError): ...


class PreprocessingError(GraphError): ...


class FunctionError(GraphError):
    """`file`, `line` and `column` (both from 1) say where in the function's source; "" and 0 where nowhere in it."""

    def __init__(self, message: str, file: str = "", line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.column = column


class AutodiffError(GraphError): ...


class MissingRuleError(AutodiffError): ...


class NotDifferentiableError(AutodiffError): ...


class TrainingError(ArchipelError): ...


class MissingLoweringError(TrainingError): ...


class NotANumberError(TrainingError): ...


class CompressionError(ArchipelError): ...


class ConversionError(ArchipelError): ...


class RuntimeInputError(ArchipelError): ...


class RuntimeLimitError(ArchipelError): ...


class RuntimeProgramError(ArchipelError): ...


class IndexRangeError(RuntimeProgramError):
    """`index` is the number that ONNX Runtime names, `highest` the largest in range; None where it does not say.

    `located` says that the text names the field and its rows.
    """

    index: int | None = None
    highest: int | None = None
    located: bool = False


class DelegateError(ArchipelError): ...


class CheckpointError(ArchipelError): ...


class SelfTestError(ArchipelError): ...


class SlotError(ArchipelError): ...


class NonFiniteLossError(ArchipelError): ...


class SimulationError(ArchipelError): ...


class InsightError(ArchipelError): ...


class StoreError(ArchipelError): ...


class StoreKeyError(StoreError): ...


class StoreErasedError(StoreError): ...


class StoreRecordError(StoreError):
    """`id` is the example's."""

    def __init__(self, message: str, id: int) -> None:
        super().__init__(message)
        self.id = id


class StoreQuotaError(StoreError): ...


class StoreBusyError(StoreError): ...


class TlsError(ArchipelError): ...


class ServerError(ArchipelError): ...


class EligibilityError(ServerError): ...


class AuditError(ServerError): ...


class LeaseLostError(ServerError): ...


class SpoiledRoundError(ServerError):
    """`suspects` are the ids of all devices that may be at fault; empty where `faults` (device: fault) names them."""

    def __init__(self, message: str, suspects: Sequence[str] = (), faults: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.suspects = tuple(suspects)
        self.faults = dict(faults or {})


class RefusalError(ServerError):
    """`archipel.server.http.problems` maps each kind to an HTTP status."""


class InvalidRequestError(RefusalError): ...


class ForbiddenError(RefusalError): ...


class NotFoundError(RefusalError): ...


class ConflictError(RefusalError): ...


class GoneError(RefusalError): ...


class ApiError(RefusalError):
    """The server answers the request with the JSON error shape and this status.

    `retry_after` is in seconds, for statuses that say when to try again.
    """

    def __init__(self, status: int, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ClientError(ArchipelError): ...


class OwnerRefusalError(ClientError):
    """`code` is the reason that the device may tell the server (protocol.messages.LeaveReason)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TooLargeError(ClientError): ...


class UnreachableError(ClientError): ...


class RefusedError(ClientError):
    """The server answered with an error status.

    `kind` is the error shape's `type` ("conflict", "gone", ...); `retry_after` is in seconds, None if not given.
    `message` is the server's text, `request_id` the request's name in the server's logs.
    """

    def __init__(
        self, status: int, kind: str, message: str, retry_after: float | None = None, request_id: str = ""
    ) -> None:
        # Further lines may mark a place in the request's text, so the status goes to the end of the first.
        first, *others = message.split("\n")
        request = f", request {request_id}" if request_id and status >= 500 else ""
        super().__init__("\n".join([f"{first} (HTTP {status}, {kind}{request})", *others]))
        self.message = message
        self.status = status
        self.kind = kind
        self.retry_after = retry_after
        self.request_id = request_id


class SessionRefusedError(RefusedError):
    """The server opens no session: it does not know the device, has revoked it, or has another key for it."""


class RoundAbandonedError(ClientError): ...


class CommandError(ArchipelError): ...
