"""The device's own key and who it is enrolled with, in its folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.bundle import generate_key, load_private_key, save_private_key
from archipel.errors import ClientError, MessageError
from archipel.lite_runtime.durable import sync_folder, write_durably
from archipel.protocol.identity import EnrolmentToken, verify_chain
from archipel.protocol.messages import Chain, DeviceId, Key, Name
from archipel.protocol.sealed import decode, encode, public_bytes

KEY_FILE = "device.key"
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
    """The files KEY_FILE (PEM, mode 0600) and RECORD_FILE in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def key(self, make: Callable[[], Ed25519PrivateKey] = generate_key) -> Ed25519PrivateKey:
        """The device's private key, made on the first call. It appears in its file whole or not at all.

        Raises SignatureError when the file is damaged, ClientError when others may read it.
        """
        path = self._folder / KEY_FILE
        if not path.exists():
            temporary = self._folder / f".{KEY_FILE}.{secrets.token_hex(8)}.tmp"
            try:
                save_private_key(make(), temporary)
                os.rename(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            sync_folder(self._folder)
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise ClientError(f"{path}: mode {mode:o} lets others read the device's key; run: chmod 600 {path}")
        return load_private_key(path)

    def record(self) -> DeviceRecord | None:
        """None before enrolment. Raises ClientError when the file is damaged or not this key's."""
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

    def enrolled(self, token: EnrolmentToken, chain: Chain, server: str) -> DeviceRecord:
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
