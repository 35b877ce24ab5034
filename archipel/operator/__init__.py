"""The Python API of a server, for people and scripts: see docs/operator-api.md."""

from archipel.operator.client import OperatorClient
from archipel.protocol.messages import Endorsement, Piece, Pieces, RoundStatus
from archipel.protocol.operator.access import AuditEntry, AuditHead, NewToken, TokenInfo, TokenRequest
from archipel.protocol.operator.devices import (
    DeviceInfo,
    PopulationInfo,
    QuarantineInfo,
    RevokedTokenInfo,
    SearchInfo,
    SuspicionInfo,
)
from archipel.protocol.operator.registry import (
    Evaluation,
    Gate,
    ModelInfo,
    PromotionInfo,
    RolloutInfo,
    RolloutRequest,
    RoundMetrics,
    Stage,
    StageEvaluation,
    StageInfo,
    VersionDetail,
    VersionInfo,
    VersionRequest,
)
from archipel.protocol.operator.results import RoundResult, StatisticResult
from archipel.protocol.operator.tasks import (
    BundleInfo,
    FaultInfo,
    Health,
    ParticipantInfo,
    RoundInfo,
    ServerInfo,
    TaskInfo,
    TaskRequest,
)
from archipel.protocol.sealed import Sealed

__all__ = [
    "AuditEntry",
    "AuditHead",
    "BundleInfo",
    "DeviceInfo",
    "Endorsement",
    "Evaluation",
    "FaultInfo",
    "Gate",
    "Health",
    "ModelInfo",
    "NewToken",
    "OperatorClient",
    "ParticipantInfo",
    "Piece",
    "Pieces",
    "PopulationInfo",
    "PromotionInfo",
    "QuarantineInfo",
    "RevokedTokenInfo",
    "RolloutInfo",
    "RolloutRequest",
    "RoundInfo",
    "RoundMetrics",
    "RoundResult",
    "RoundStatus",
    "Sealed",
    "SearchInfo",
    "ServerInfo",
    "Stage",
    "StageEvaluation",
    "StageInfo",
    "StatisticResult",
    "SuspicionInfo",
    "TaskInfo",
    "TaskRequest",
    "TokenInfo",
    "TokenRequest",
    "VersionDetail",
    "VersionInfo",
    "VersionRequest",
]
