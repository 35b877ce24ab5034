"""Makes a data folder, and checks and writes the keys in it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from archipel.bundle import generate_key, is_development_key, load_public_key, save_private_key, save_public_key
from archipel.durable import write_durably
from archipel.errors import BundleError, DevelopmentKeyError, ServerError
from archipel.server.authority import SERVER_FILE, make_authority, read_names
from archipel.server.settings import PUBLIC_KEY_FILE, SERVER_KEY_FILE, SETTINGS_FILE, Settings
from archipel.server.upstream_settings import Upstream


def init_data_folder(
    folder: Path | str,
    *,
    enrolment_key: bytes,
    publisher_keys: Sequence[bytes],
    allow_development: bool = False,
    tls_names: Sequence[str] = (),
    upstream: tuple[Upstream, bytes] | None = None,
) -> str:
    """Make a data folder with a new server key and server.toml.

    Arguments:
        folder: A new or empty folder.
        enrolment_key: Raw 32-byte Ed25519 public key that certifies enrolment tokens.
        publisher_keys: Raw 32-byte Ed25519 public keys of accepted publishers, at least one.
        allow_development: Whether development keys may be among them.
        tls_names: The server's DNS names and IP addresses, for which a private authority certifies it; else no TLS.
        upstream: Of an edge server: its settings, and the bytes of its enrolment token.

    Returns:
        An operator token. Only its hash is stored, so it is shown here once.

    Raises:
        ServerError: The folder is not empty or cannot be written, or a key is wrong.
        DevelopmentKeyError: A publisher's key is a development key.
        TlsError: A name is neither a DNS name nor an address.

    Example:
        enrolment = generate_key()  # its private half stays with who makes enrolment tokens
        token = init_data_folder("server", enrolment_key=enrolment.public_key().public_bytes_raw(), publisher_keys=keys)
        print(load_settings("server").port)
    """
    folder = Path(folder)
    if (folder / SETTINGS_FILE).exists():
        raise ServerError(f"{folder / SETTINGS_FILE}: exists already; choose another folder or start this one")
    if folder.exists() and not folder.is_dir():
        raise ServerError(f"{folder}: a file; a data folder is new or empty")
    for key in (enrolment_key, *publisher_keys):
        if len(key) != 32:
            raise ServerError(f"a public key has 32 bytes, got {len(key)}")
    if not publisher_keys:
        raise ServerError("at least one publisher key is needed, or no bundle could be accepted")
    if not allow_development and any(map(is_development_key, publisher_keys)):
        raise DevelopmentKeyError(
            "a publisher's key is a development key, which is for trying out only; make one with `archipel keys FILE`, "
            "or allow it (allow_development)"
        )
    token = secrets.token_urlsafe(32)
    # A plain hash is enough for a token of 256 random bits, which nobody can find by trying.
    lines = [
        "# Settings of an archipel server. Environment variables ARCHIPEL_SERVER_NAME override them.",
        f'enrolment_key = "{enrolment_key.hex()}"',
        f"publisher_keys = [{', '.join(chr(34) + key.hex() + chr(34) for key in publisher_keys)}]",
        f'operator_token_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"',
        *(["allow_development = true"] if allow_development else []),
        *([f'tls_certificate = "{SERVER_FILE}"'] if tls_names else []),
        *([] if upstream is None else upstream[0].lines()),
    ]
    if tls_names:
        read_names(tls_names)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ServerError(f"{folder}: not empty; choose a new or an empty folder")
        # `mkdir` leaves a folder that was there with the mode that it had.
        folder.chmod(0o700)
        own = generate_key()
        save_private_key(own, folder / SERVER_KEY_FILE)
        save_public_key(own, folder / PUBLIC_KEY_FILE)
        if tls_names:
            make_authority(folder, tls_names)
        if upstream is not None:
            write_durably(folder / upstream[0].token, upstream[1])
        # Last: a folder with settings is complete. After a kill before that the folder must be emptied.
        _write_new(folder / SETTINGS_FILE, "\n".join(lines) + "\n")
    except OSError as error:
        raise ServerError(f"{folder}: cannot be written ({error.strerror})") from None
    except BundleError as error:
        raise ServerError(f"server key: {error}") from None
    return token


def check_private_key(settings: Settings) -> None:
    """Raise ServerError if all users of this machine may access the server's key."""
    path = settings.path(settings.server_key)
    if path.exists() and path.stat().st_mode & 0o007:
        raise ServerError(f"{path}: everybody on this machine may use the server's key; run: chmod 600 {path}")


def keep_public_key(settings: Settings) -> None:
    """Write server.key.pub in the data folder unless it has the public half of the server's key. Raises ServerError."""
    path = settings.path(PUBLIC_KEY_FILE)
    try:
        # It is written anew if it is missing, damaged, or the public half of a key that was replaced.
        with suppress(BundleError):
            if load_public_key(path) == settings.public_key:
                return
        path.unlink(missing_ok=True)
        save_public_key(settings.private_key, path)
    except (BundleError, OSError) as error:
        raise ServerError(f"public half of the server key: {error}") from None


def _write_new(path: Path, text: str) -> None:
    write_durably(path, text.encode())
