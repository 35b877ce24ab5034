"""The device's identity: its own key, in its key store, and the record of its enrolment, in its folder.

A rotation stores the next key before the server hears of it, and keeps the old key until the server has taken the next
one. So the key that the server accepts is there wherever the process is killed. The record's chain says which key it is
for: once the record is for the next key, that key takes the place of the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import Manifest, decode_private_key, encode_private_key, generate_key
from archipel.client.memory.keystore import DEVICE_KEY, NEXT_DEVICE_KEY, FileKeys, KeyStore
from archipel.durable import make_folder, write_durably
from archipel.errors import ClientError, MessageError, ProtocolError
from archipel.protocol.identity import EnrolmentToken, extend_chain, read_chain, verify_chain
from archipel.protocol.messages import Chain, DeviceId, Key, Name, Root
from archipel.protocol.sealed import Sealed, decode, encode, public_bytes

RECORD_FILE = "device.json"
EDGES_FOLDER = "edges"
"""With the records of edge servers that the device has left."""
_MAX_RECORD_BYTES = 64 << 10


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file device.json of an enrolled device. Its keys are pinned: no later answer of the server changes them.

    `root` is there where the server is an edge server.
    """

    device_id: DeviceId
    server: str
    server_key: Key
    enrolment_key: Key
    publisher_keys: list[Key]
    population: Name
    chain: Chain
    root: Root | None = None

    def of_log(self, manifest: Manifest) -> DeviceRecord:
        """The record with the server in it that keeps the weights log of this bundle, with its key and population: the
        root where a tree of servers trains the bundle."""
        if self.root is None or manifest.privacy.aggregators is None:
            return self
        root = self.root
        return msgspec.structs.replace(
            self, server_key=root.server_key, enrolment_key=root.enrolment_key, population=root.population
        )


class IdentityStore:
    """The secret DEVICE_KEY, during a rotation also NEXT_DEVICE_KEY, and the file RECORD_FILE in `folder`."""

    def __init__(self, folder: Path, keys: KeyStore | None = None) -> None:
        self._folder = folder
        self._keys: KeyStore = FileKeys(folder) if keys is None else keys

    def key(self, make: Callable[[], Ed25519PrivateKey] = generate_key) -> Ed25519PrivateKey:
        """The device's private key, made on the first call.

        Raises SignatureError if the secret is damaged, ClientError if it cannot be read.
        """
        return self._load_or_make(DEVICE_KEY, make)

    def next_key(self, make: Callable[[], Ed25519PrivateKey] = generate_key) -> Ed25519PrivateKey:
        """The key that is to replace `key`: made on the first call, and the same one until `finish_rotation`.

        Raises the errors of `key`.
        """
        return self._load_or_make(NEXT_DEVICE_KEY, make)

    @property
    def rotating(self) -> bool:
        """Whether there is a next key, which the server may have taken already."""
        return self._keys.load(NEXT_DEVICE_KEY) is not None

    def _load_or_make(self, name: str, make: Callable[[], Ed25519PrivateKey]) -> Ed25519PrivateKey:
        secret = self._keys.load(name)
        if secret is None:
            secret = encode_private_key(make())
            self._keys.store(name, secret)
        return decode_private_key(secret, f"{self._folder}: {name}")

    def record(self) -> DeviceRecord | None:
        """The record, None before enrolment. Completes a rotation that a kill interrupted after the record was written.

        Raises ClientError if the file is damaged or is not for this key.
        """
        record = self._read_record()
        if record is not None:
            self._settle(record)
        return record

    def finish_rotation(self, record: DeviceRecord, certificate: Sealed) -> DeviceRecord:
        """Write RECORD_FILE with the next key's certificate in its chain, and make the next key the device's key.

        To be called when the server accepts the next key. Raises CertificateError or ClientError if the certificate is
        not for that key.
        """
        chain = extend_chain(record.chain, certificate)
        device = verify_chain(chain, record.enrolment_key, population=record.population)
        if device.device_key != public_bytes(self.next_key()):
            raise ClientError("rotation: the certificate is for another key")
        changed = msgspec.structs.replace(record, chain=chain)
        # The record first, because it says which key is the present one; `_settle` moves the key after that, now or,
        # after a kill, when the record is read next.
        write_durably(self._folder / RECORD_FILE, encode(changed))
        self._settle(changed)
        return changed

    def _settle(self, record: DeviceRecord) -> None:
        """Make DEVICE_KEY the key that the record is for, from any state in which a kill may leave the two keys."""
        try:
            newest = verify_chain(record.chain, record.enrolment_key, population=record.population).device_key
        except ProtocolError as error:
            raise ClientError(
                f"{self._folder / RECORD_FILE}: damaged ({error}); enrol again with a new token"
            ) from None
        if public_bytes(self.key()) == newest:
            # Both hold the same key if a kill came between the last two lines below. A different next key belongs to a
            # rotation that the server has not answered, and must stay.
            if self.rotating and public_bytes(self.next_key()) == newest:
                self._keys.delete(NEXT_DEVICE_KEY)
            return
        if not self.rotating or public_bytes(self.next_key()) != newest:
            raise ClientError(
                f"{self._folder}: {DEVICE_KEY} is not the key in {RECORD_FILE}; enrol again with a new token"
            )
        # Store the key under its new name before deleting the old name: a kill in between leaves both, which the code
        # above settles. The other order could lose the device's identity.
        self._keys.store(DEVICE_KEY, encode_private_key(self.next_key()))
        self._keys.delete(NEXT_DEVICE_KEY)

    def keep_record(self, record: DeviceRecord) -> None:
        """Keep the record of the edge server that the device is about to leave, for its return."""
        path = self._kept(record.server_key)
        make_folder(path.parent)
        write_durably(path, encode(record))

    def kept_record(self, token: EnrolmentToken) -> DeviceRecord | None:
        """The record of an earlier time at the token's server, if it is for the present key."""
        kept = self._read_record(self._kept(token.server_key))
        if kept is None or (kept.population, kept.root) != (token.population, token.root):
            return None
        return kept if read_chain(kept.chain)[1] == public_bytes(self.key()) else None

    def go_back(self, record: DeviceRecord) -> DeviceRecord:
        """Make `record`, a kept one, the present one again. Durable when it returns."""
        write_durably(self._folder / RECORD_FILE, encode(record))
        return record

    def _kept(self, server_key: bytes) -> Path:
        return self._folder / EDGES_FOLDER / f"{server_key.hex()}.json"

    def _read_record(self, path: Path | None = None) -> DeviceRecord | None:
        path = path or self._folder / RECORD_FILE
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
        """Write RECORD_FILE. Raises CertificateError or ClientError if the chain is not for this device's key."""
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
            root=token.root,
        )
        write_durably(self._folder / RECORD_FILE, encode(record))
        return record
