"""Every message between device and server, and between devices through the server.

They are JSON by msgspec, with `bytes` as base64. The docstring of a signed struct begins with its label (see `sealed`).
Keys are raw 32-byte public keys, digests are SHA-256 in hexadecimal, times are Unix seconds.
"""

from __future__ import annotations

from archipel.protocol.messages.rounds import KEY_PATH_BYTES as KEY_PATH_BYTES
from archipel.protocol.messages.rounds import MAX_COHORT as MAX_COHORT
from archipel.protocol.messages.rounds import MAX_ENTRIES as MAX_ENTRIES
from archipel.protocol.messages.rounds import MAX_MODELS as MAX_MODELS
from archipel.protocol.messages.rounds import MAX_PIECES as MAX_PIECES
from archipel.protocol.messages.rounds import MAX_REVOCATION_BYTES as MAX_REVOCATION_BYTES
from archipel.protocol.messages.rounds import MAX_REVOKED as MAX_REVOKED
from archipel.protocol.messages.rounds import MAX_ROTATIONS as MAX_ROTATIONS
from archipel.protocol.messages.rounds import Advertisement as Advertisement
from archipel.protocol.messages.rounds import AdvertiseRequest as AdvertiseRequest
from archipel.protocol.messages.rounds import BearerToken as BearerToken
from archipel.protocol.messages.rounds import Chain as Chain
from archipel.protocol.messages.rounds import Challenge as Challenge
from archipel.protocol.messages.rounds import ChallengeRequest as ChallengeRequest
from archipel.protocol.messages.rounds import CheckIn as CheckIn
from archipel.protocol.messages.rounds import CheckInResponse as CheckInResponse
from archipel.protocol.messages.rounds import Cohort as Cohort
from archipel.protocol.messages.rounds import Complaint as Complaint
from archipel.protocol.messages.rounds import Complaints as Complaints
from archipel.protocol.messages.rounds import Confirmation as Confirmation
from archipel.protocol.messages.rounds import Confirmations as Confirmations
from archipel.protocol.messages.rounds import Confirmed as Confirmed
from archipel.protocol.messages.rounds import ConfirmRequest as ConfirmRequest
from archipel.protocol.messages.rounds import DeviceId as DeviceId
from archipel.protocol.messages.rounds import Digest as Digest
from archipel.protocol.messages.rounds import EncryptedShare as EncryptedShare
from archipel.protocol.messages.rounds import Endorsement as Endorsement
from archipel.protocol.messages.rounds import Endorser as Endorser
from archipel.protocol.messages.rounds import EnrolmentProof as EnrolmentProof
from archipel.protocol.messages.rounds import EnrolmentRequest as EnrolmentRequest
from archipel.protocol.messages.rounds import EnrolmentResponse as EnrolmentResponse
from archipel.protocol.messages.rounds import EnvelopeKey as EnvelopeKey
from archipel.protocol.messages.rounds import IdentityCertificate as IdentityCertificate
from archipel.protocol.messages.rounds import Key as Key
from archipel.protocol.messages.rounds import Kind as Kind
from archipel.protocol.messages.rounds import LeaveReason as LeaveReason
from archipel.protocol.messages.rounds import LeaveRequest as LeaveRequest
from archipel.protocol.messages.rounds import Member as Member
from archipel.protocol.messages.rounds import Message as Message
from archipel.protocol.messages.rounds import Metrics as Metrics
from archipel.protocol.messages.rounds import Name as Name
from archipel.protocol.messages.rounds import Offer as Offer
from archipel.protocol.messages.rounds import Phase as Phase
from archipel.protocol.messages.rounds import Piece as Piece
from archipel.protocol.messages.rounds import Pieces as Pieces
from archipel.protocol.messages.rounds import Problem as Problem
from archipel.protocol.messages.rounds import Receipt as Receipt
from archipel.protocol.messages.rounds import RevealedShare as RevealedShare
from archipel.protocol.messages.rounds import Revocations as Revocations
from archipel.protocol.messages.rounds import RotationCertificate as RotationCertificate
from archipel.protocol.messages.rounds import RotationProof as RotationProof
from archipel.protocol.messages.rounds import RotationRequest as RotationRequest
from archipel.protocol.messages.rounds import RotationResponse as RotationResponse
from archipel.protocol.messages.rounds import RoundId as RoundId
from archipel.protocol.messages.rounds import RoundPlan as RoundPlan
from archipel.protocol.messages.rounds import RoundStatus as RoundStatus
from archipel.protocol.messages.rounds import SessionProof as SessionProof
from archipel.protocol.messages.rounds import SessionRequest as SessionRequest
from archipel.protocol.messages.rounds import SessionResponse as SessionResponse
from archipel.protocol.messages.rounds import SetAside as SetAside
from archipel.protocol.messages.rounds import Shares as Shares
from archipel.protocol.messages.rounds import Signature as Signature
from archipel.protocol.messages.rounds import Survivors as Survivors
from archipel.protocol.messages.rounds import TokenCertificate as TokenCertificate
from archipel.protocol.messages.rounds import Unmasking as Unmasking
from archipel.protocol.messages.rounds import VersionNumber as VersionNumber
from archipel.protocol.messages.rounds import WeightsLog as WeightsLog
from archipel.protocol.messages.rounds import WeightsStatement as WeightsStatement
from archipel.protocol.messages.rounds import Whole as Whole
