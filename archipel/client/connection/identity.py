"""The device's own key, in its key store, and who it is enrolled with, in its folder.

Replacing the key: the next one is stored before the server hears of it, and the old one until the server has taken the
next. So whichever of them the server answers to is there, wherever the process is killed. Which one the record is for
says its chain; a record that was written for the next key is the sign to put that in the old one's place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import decode_private_key, encode_private_key, generate_key
from archipel.client.memory.keystore import DEVICE_KEY, NEXT_DEVICE_KEY, FileKeys, KeyStore
from archipel.durable import write_durably
from archipel.errors import ClientError, MessageError, ProtocolError
from archipel.protocol.identity import EnrolmentToken, extend_chain, verify_chain
from archipel.protocol.messages import Chain, DeviceId, Key, Name
from archipel.protocol.sealed import Sealed, decode, encode, public_bytes

RECORD_FILE = "device.json"
_MAX_RECORD_BYTES = 64 << 10


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """device.json: what enrolment left. All keys are pinned: no later answer of the server can change them."""

    device_id: DeviceId
    server: str
    server_key: Key
    enrolment_key: Key
    publisher_keys: list[Key]
    population: Name
    chain: Chain


class IdentityStore:
    """The secrets DEVICE_KEY and, while the key is replaced, NEXT_DEVICE_KEY, and the file RECORD_FILE in `folder`."""

    def __init__(self, folder: Path, keys: KeyStore | None = None) -> None:
        self._folder = folder
        self._keys: KeyStore = FileKeys(folder) if keys is None else keys

    def key(self, make: Callable[[], Ed25519PrivateKey] = generate_key) -> Ed25519PrivateKey:
        """The device's private key, made on the first call.

        Raises SignatureError when the secret is damaged, ClientError when it cannot be used.
        """
        return self._load_or_make(DEVICE_KEY, make)

    def next_key(self, make: Callable[[], Ed25519PrivateKey] = generate_key) -> Ed25519PrivateKey:
        """The key that is to replace `key`: made on the first call, and the same one until `finish_rotation`.

        Raises the errors of `key`.
        """
        return self._load_or_make(NEXT_DEVICE_KEY, make)

    @property
    def rotating(self) -> bool:
        """Whether there is a next key: the server may answer to it already."""
        return self._keys.load(NEXT_DEVICE_KEY) is not None

    def _load_or_make(self, name: str, make: Callable[[], Ed25519PrivateKey]) -> Ed25519PrivateKey:
        secret = self._keys.load(name)
        if secret is None:
            secret = encode_private_key(make())
            self._keys.store(name, secret)
        return decode_private_key(secret, f"{self._folder}: {name}")

    def record(self) -> DeviceRecord | None:
        """None before enrolment. Finishes `finish_rotation` where that was interrupted.

        Raises ClientError when the file is damaged or not this key's.
        """
        record = self._read_record()
        if record is not None:
            self._settle(record)
        return record

    def finish_rotation(self, record: DeviceRecord, certificate: Sealed) -> DeviceRecord:
        """The server answers to the next key: write RECORD_FILE with the certificate at the end of its chain, and put
        the next key in the old one's place. Raises CertificateError when the certificate is not for that."""
        chain = extend_chain(record.chain, certificate)
        device = verify_chain(chain, record.enrolment_key, population=record.population)
        if device.device_key != public_bytes(self.next_key()):
            raise ClientError("rotation: the certificate is for another key")
        changed = msgspec.structs.replace(record, chain=chain)
        # The record says which key is the present one, so it comes first; `_settle` moves the key after it, now or when
        # the record is next read.
        write_durably(self._folder / RECORD_FILE, encode(changed))
        self._settle(changed)
        return changed

    def _settle(self, record: DeviceRecord) -> None:
        try:
            newest = verify_chain(record.chain, record.enrolment_key, population=record.population).device_key
        except ProtocolError as error:
            raise ClientError(
                f"{self._folder / RECORD_FILE}: damaged ({error}); enrol again with a new token"
            ) from None
        if public_bytes(self.key()) == newest:
            if self.rotating and public_bytes(self.next_key()) == newest:
                self._keys.delete(NEXT_DEVICE_KEY)
            return
        if not self.rotating or public_bytes(self.next_key()) != newest:
            raise ClientError(
                f"{self._folder}: {DEVICE_KEY} is not the key in {RECORD_FILE}; enrol again with a new token"
            )
        # Stored under the new name before it goes from the old one: a kill in between leaves both, which is settled
        # above; the other order could lose the device's identity.
        self._keys.store(DEVICE_KEY, encode_private_key(self.next_key()))
        self._keys.delete(NEXT_DEVICE_KEY)

    def _read_record(self) -> DeviceRecord | None:
        path = self._folder / RECORD_FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClientError(f"{path}: cannot be read ({error.strerror})") from None
        try:
            if len(data) > _MAX_RECORD_BYTES:
                raise MessageError(f"{len(data)} bytes, the limit is {_MAX_RECORD_BYTES}")
            return decode("device record", data, DeviceRecord)
        except MessageError as error:
            raise ClientError(f"{path}: damaged ({error}); enrol again with a new token") from None

    def record_enrolment(self, token: EnrolmentToken, chain: Chain, server: str) -> DeviceRecord:
        """Write RECORD_FILE. Raises CertificateError when the chain is not this key's."""
        device = verify_chain(chain, token.enrolment_key, population=token.population)
        if device.device_key != public_bytes(self.key()):
            raise ClientError("enrolment: the chain is for another device's key")
        record = DeviceRecord(
            device_id=device.device_id,
            server=server,
            server_key=token.server_key,
            enrolment_key=token.enrolment_key,
            publisher_keys=token.publisher_keys,
            population=token.population,
            chain=chain,
        )
        write_durably(self._folder / RECORD_FILE, encode(record))
        return record
