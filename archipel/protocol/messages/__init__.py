"""Every message between device and server, and between devices through the server.

They are JSON by msgspec, with `bytes` as base64. The docstring of a signed struct begins with its label (see `sealed`).
Keys are raw 32-byte public keys, digests are SHA-256 in hexadecimal, times are Unix seconds.
"""

from __future__ import annotations

from archipel.protocol.messages.answers import Piece as Piece
from archipel.protocol.messages.answers import Pieces as Pieces
from archipel.protocol.messages.answers import Problem as Problem
from archipel.protocol.messages.answers import Receipt as Receipt
from archipel.protocol.messages.base import KEY_PATH_BYTES as KEY_PATH_BYTES
from archipel.protocol.messages.base import MAX_COHORT as MAX_COHORT
from archipel.protocol.messages.base import MAX_ENTRIES as MAX_ENTRIES
from archipel.protocol.messages.base import MAX_MODELS as MAX_MODELS
from archipel.protocol.messages.base import MAX_PIECES as MAX_PIECES
from archipel.protocol.messages.base import MAX_REVOCATION_BYTES as MAX_REVOCATION_BYTES
from archipel.protocol.messages.base import MAX_REVOKED as MAX_REVOKED
from archipel.protocol.messages.base import MAX_ROTATIONS as MAX_ROTATIONS
from archipel.protocol.messages.base import BearerToken as BearerToken
from archipel.protocol.messages.base import DeviceId as DeviceId
from archipel.protocol.messages.base import Digest as Digest
from archipel.protocol.messages.base import Key as Key
from archipel.protocol.messages.base import Message as Message
from archipel.protocol.messages.base import MetricName as MetricName
from archipel.protocol.messages.base import Metrics as Metrics
from archipel.protocol.messages.base import Name as Name
from archipel.protocol.messages.base import RoundId as RoundId
from archipel.protocol.messages.base import Signature as Signature
from archipel.protocol.messages.base import VersionNumber as VersionNumber
from archipel.protocol.messages.base import Whole as Whole
from archipel.protocol.messages.distributions import Bins as Bins
from archipel.protocol.messages.distributions import Distributions as Distributions
from archipel.protocol.messages.identity import Chain as Chain
from archipel.protocol.messages.identity import Challenge as Challenge
from archipel.protocol.messages.identity import ChallengeRequest as ChallengeRequest
from archipel.protocol.messages.identity import EnrolmentProof as EnrolmentProof
from archipel.protocol.messages.identity import EnrolmentRequest as EnrolmentRequest
from archipel.protocol.messages.identity import EnrolmentResponse as EnrolmentResponse
from archipel.protocol.messages.identity import IdentityCertificate as IdentityCertificate
from archipel.protocol.messages.identity import RotationCertificate as RotationCertificate
from archipel.protocol.messages.identity import RotationProof as RotationProof
from archipel.protocol.messages.identity import RotationRequest as RotationRequest
from archipel.protocol.messages.identity import RotationResponse as RotationResponse
from archipel.protocol.messages.identity import SessionProof as SessionProof
from archipel.protocol.messages.identity import SessionRequest as SessionRequest
from archipel.protocol.messages.identity import SessionResponse as SessionResponse
from archipel.protocol.messages.identity import TokenCertificate as TokenCertificate
from archipel.protocol.messages.rounds import CheckIn as CheckIn
from archipel.protocol.messages.rounds import CheckInResponse as CheckInResponse
from archipel.protocol.messages.rounds import Kind as Kind
from archipel.protocol.messages.rounds import LeaveReason as LeaveReason
from archipel.protocol.messages.rounds import LeaveRequest as LeaveRequest
from archipel.protocol.messages.rounds import NoiseShare as NoiseShare
from archipel.protocol.messages.rounds import Offer as Offer
from archipel.protocol.messages.rounds import Phase as Phase
from archipel.protocol.messages.rounds import Protocol as Protocol
from archipel.protocol.messages.rounds import Revocations as Revocations
from archipel.protocol.messages.rounds import RoundPlan as RoundPlan
from archipel.protocol.messages.rounds import RoundStatus as RoundStatus
from archipel.protocol.messages.rounds import ServerNoise as ServerNoise
from archipel.protocol.messages.rounds import SetAside as SetAside
from archipel.protocol.messages.rounds import over_neighbours as over_neighbours
from archipel.protocol.messages.secure import Advertisement as Advertisement
from archipel.protocol.messages.secure import AdvertiseRequest as AdvertiseRequest
from archipel.protocol.messages.secure import Cohort as Cohort
from archipel.protocol.messages.secure import Complaint as Complaint
from archipel.protocol.messages.secure import Complaints as Complaints
from archipel.protocol.messages.secure import Confirmation as Confirmation
from archipel.protocol.messages.secure import Confirmations as Confirmations
from archipel.protocol.messages.secure import Confirmed as Confirmed
from archipel.protocol.messages.secure import ConfirmRequest as ConfirmRequest
from archipel.protocol.messages.secure import EncryptedShare as EncryptedShare
from archipel.protocol.messages.secure import EnvelopeKey as EnvelopeKey
from archipel.protocol.messages.secure import Member as Member
from archipel.protocol.messages.secure import RevealedShare as RevealedShare
from archipel.protocol.messages.secure import Shares as Shares
from archipel.protocol.messages.secure import Survivors as Survivors
from archipel.protocol.messages.secure import Unmasking as Unmasking
from archipel.protocol.messages.weights_log import Endorsement as Endorsement
from archipel.protocol.messages.weights_log import Endorser as Endorser
from archipel.protocol.messages.weights_log import WeightsLog as WeightsLog
from archipel.protocol.messages.weights_log import WeightsStatement as WeightsStatement
