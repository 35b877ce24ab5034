"""The server's settings: one TOML file in the data folder. An environment variable can override each of them."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from archipel.bundle import load_private_key
from archipel.errors import BundleError, ServerError
from archipel.protocol import settings_file
from archipel.server.openid_settings import OpenId
from archipel.server.upstream_settings import Upstream

SETTINGS_FILE = "server.toml"
SERVER_KEY_FILE = "server.key"
PUBLIC_KEY_FILE = "server.key.pub"
ENVIRONMENT_PREFIX = "ARCHIPEL_SERVER_"
DEMO_DOWNLOADS = 64
MIN_FREE_BYTES = 16 << 20
"""With less space on its disk a server does not start, and is not ready."""
_NAME = "[A-Za-z0-9_-][A-Za-z0-9._-]*"
_ORIGIN = re.compile(r"https?://[a-z0-9.-]{1,253}(:[0-9]{1,5})?")
_BUCKET = re.compile(f"s3://([a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])(?:/({_NAME}(?:/{_NAME})*))?/?")

HexKey = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Long = Annotated[float, Meta(gt=0, le=3_153_600_000)]
Bytes = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0, le=1e6)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The settings of a server process. Keys are 64 hexadecimal digits, times are in seconds, sizes in bytes.

    The environment variable ARCHIPEL_SERVER_NAME overrides setting NAME (upper case; lists separated by commas, or in
    JSON).

    Example: see `archipel.server.load_settings`.
    """

    folder: str
    """The data folder; every relative path below starts there."""
    enrolment_key: HexKey
    """Public half of the key that certifies enrolment tokens."""
    publisher_keys: Annotated[tuple[HexKey, ...], Meta(min_length=1)]
    """Bundles signed by one of these are accepted."""
    operator_token_sha256: HexKey
    allow_development: bool = False
    """Whether bundles that a development key signed are accepted; such keys are for trying out only."""
    server_key: str = SERVER_KEY_FILE
    """File of the private key that signs plans."""
    database: str = ""
    """SQLAlchemy URL; empty: SQLite in the data folder."""
    blobs: str = "blobs"
    """Where bundles, weights and spooled updates are: a folder, or s3://BUCKET/PREFIX."""
    blob_cache_bytes: Bytes = 4 << 30
    """How much of an object store's bundles and weights is cached in the data folder."""
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8470
    tls_certificate: str = ""
    """PEM file of the certificate, followed by intermediate certificates; empty: plain HTTP."""
    tls_key: str = ""
    """PEM file of the certificate's private key; empty: it is in the certificate's file."""
    tls_client_ca: str = ""
    """PEM file of authorities; if set, only clients with a certificate by one of them are served."""
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    """Web processes. SQLite has one writer at a time, so more than one pays off with PostgreSQL only."""
    threads: Annotated[int, Meta(ge=1, le=256)] = 16
    """Threads of each web process."""
    max_json_bytes: Bytes = 4 << 20
    max_bundle_bytes: Bytes = 1 << 30
    max_update_bytes: Bytes = 1 << 30
    robust_bytes: Bytes = 2 << 30
    """The most memory that the single updates of a round may take, which a task with a robust rule keeps."""
    requests_per_second: Rate = 100.0
    """Average limit for one device or one access token, in each web process."""
    anonymous_per_second: Rate = 50.0
    """Average limit for unauthenticated requests of one address: enrolment, challenges, sessions, refused tokens."""
    burst_seconds: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """As many requests as are allowed in this time may come at once."""
    concurrent_requests: Annotated[int, Meta(ge=1, le=256)] = 8
    """Limit for one device, token or address at the same time, in each web process; below `threads`."""
    stall_seconds: Seconds = 30.0
    """A client that sends nothing for so long in the middle of a request is cut off, because it keeps a thread busy."""
    trusted_proxies: Annotated[int, Meta(ge=0, le=10)] = 0
    """How many proxies in front of the server add the client's address to X-Forwarded-For; 0: the header is ignored."""
    retry_after: Annotated[float, Meta(ge=0.01, le=86400)] = 2.0
    """How long a device waits between check-ins while there are few devices, and at most in a small fleet with rounds
    under way, which asks more often (devices.pace); in a round, half of it."""
    check_ins_per_second: Rate = 200.0
    """With more devices than this rate allows each one waits longer, for a random time (devices.pace)."""
    check_in_window: Seconds = 10.0
    """A device may be assigned from this time before it is due until this time after; at least 3 x `retry_after`."""
    hold_seconds: Annotated[float, Meta(ge=0, le=300)] = 15.0
    """How long at most a check-in is kept back that asks for it, until the device is in a round; 0: never. Proxies cut
    connections off that are idle for longer. No more than 1.5 x `check_in_window` counts."""
    held_check_ins: Annotated[int, Meta(ge=0, le=1024)] = 64
    """How many check-ins each web process keeps back at the same time, in threads beside `threads`."""
    live_pages: Annotated[int, Meta(ge=0, le=2048)] = 512
    """How many open pages of the dashboard each web process keeps up to date, in threads beside `threads`, which are
    made when they are used; 0: none, and a page shows what was when it was opened."""
    session_seconds: Seconds = 900.0
    person_seconds: Long = 43_200.0
    """How long somebody stays logged in at the dashboard at most."""
    person_idle_seconds: Long = 3_600.0
    """How long somebody stays logged in who opens no page."""
    challenge_seconds: Seconds = 60.0
    poll_seconds: Annotated[float, Meta(ge=0.005, le=10)] = 0.05
    """How long an idle coordinator rests between two steps."""
    lease_seconds: Annotated[float, Meta(ge=1, le=3600)] = 10.0
    """If a coordinator does not renew its lease for so long, another server's coordinator takes over."""
    smallest_answer: Annotated[int, Meta(ge=1, le=1000)] = 10
    """Numbers of devices that depend on attributes are shown as multiples of this only (devices.smallest_answer)."""
    max_failed_rounds: Annotated[int, Meta(ge=1, le=1000)] = 5
    """After this many failed rounds in a row a task fails; docs/tasks.md says which ones count."""
    leave_seconds: Long = 30.0
    """How long a device that left a round is not taken again (devices.rests): with each further time twice as long,
    unless no round can begin without it."""
    max_spoiled_rounds: Annotated[int, Meta(ge=0, le=100_000)] = 50
    """So many rounds in a row may be spoiled while the server searches for the spoiler; later ones count as failed."""
    max_faults: Annotated[int, Meta(ge=1, le=1000)] = 3
    """A device with this many faults of its own within `fault_seconds` is set aside."""
    fault_seconds: Long = 7 * 86400.0
    """Faults count for this time. A search for spoilers ends after this time without a spoiled round."""
    quarantine_seconds: Long = 86400.0
    """How long a device is set aside the first time. Each further time is twice as long as the one before."""
    false_accusations: Annotated[float, Meta(gt=0, le=0.5)] = 0.05
    """The risk that a search for spoilers sets any honest device aside. A smaller risk takes more rounds."""
    allowed_origins: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    """Pages of these origins, such as https://app.example, may be devices; empty: of this server's own origin only."""
    demo: bool = False
    """Whether anybody may load the browser demo at /demo/ (`make web` builds it)."""
    docs: bool = False
    """Whether anybody may read the documentation at /docs/ (`make docs` builds it)."""
    query_approval: bool = False
    """Whether evaluations and analyses wait until somebody else with the right to run them approves."""
    log_bytes: Annotated[int, Meta(ge=0)] = 64 << 20
    """requests.log and server.log are rotated at this size; 0: never, for another program to do it."""
    log_format: Literal["text", "json"] = "text"
    """How lines of server.log are written; those of requests.log are JSON always."""
    slow_query_ms: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Statements that take so many milliseconds are logged, without their parameters; 0: none."""
    otlp_address: str = ""
    """Where spans of rounds are sent (OTLP over HTTP), such as http://localhost:4318; empty: nowhere."""
    mlflow_address: str = ""
    """An MLflow server that is told of tasks: their metrics and models; empty: none."""
    drain_seconds: Annotated[float, Meta(ge=0, le=300)] = 0.0
    """How long a server that is told to stop still serves while /readyz says 503."""
    stop_seconds: Annotated[int, Meta(ge=1, le=3600)] = 5
    """How long requests under way may take after that, before they are cut off."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Where Prometheus reads the server's metrics, at /metrics; 0: nowhere, and nothing is measured."""
    metrics_host: str = "127.0.0.1"
    """The address of that port. One that other machines reach needs a `metrics_token_sha256`, and speaks TLS where the
    server has a certificate."""
    metrics_token_sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the bearer token with which metrics are read; empty: who can reach the port needs none."""
    keep_versions: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Weights of so many newest versions of each model and training are kept, and of older ones only what something
    needs (server.retention); 0: nothing is deleted."""
    keep_days: Annotated[float, Meta(ge=0, le=36_500)] = 30.0
    """Weights of this many days are kept, however many versions they are of."""
    logs_kept: Annotated[int, Meta(ge=0, le=1000)] = 4
    """How many earlier files of each log are kept, as NAME.1 (the newest) and so on."""
    upstream: Upstream | None = None
    """Of an edge server: the server above it, by whose tasks alone bundles for edge servers are then trained."""
    openid: OpenId | None = None
    """The provider of identities at which people log in at the dashboard; none: with access tokens only."""

    def __post_init__(self) -> None:
        if self.check_in_window < 3 * self.retry_after:
            raise ValueError(
                f"check_in_window ({self.check_in_window} s) must be at least 3 x retry_after ({self.retry_after} s), "
                "or waiting devices are taken for gone"
            )
        if (self.tls_key or self.tls_client_ca) and not self.tls_certificate:
            raise ValueError(
                "tls_key and tls_client_ca need a tls_certificate; without one the server speaks plain HTTP"
            )
        if self.database.startswith("postgres://"):
            raise ValueError("database: the URL of PostgreSQL starts with postgresql://, not with postgres://")
        if self.concurrent_requests >= self.threads:
            raise ValueError(
                f"concurrent_requests ({self.concurrent_requests}) must be below threads ({self.threads}), or one "
                "client could keep all of them busy"
            )
        if self.metrics_port and not self.metrics_token_sha256 and not is_loopback(self.metrics_host):
            raise ValueError(
                f"metrics_host: other machines can reach {self.metrics_host}, so set metrics_token_sha256 as well: the "
                "SHA-256 of a token that Prometheus sends"
            )
        for origin in self.allowed_origins:
            # As browsers write it; another spelling would never be equal to what they send.
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins: expected such as https://app.example or http://localhost:5173, in small letters "
                    f"and without a slash at the end, got {origin[:100]!r}"
                )
        if "://" in self.blobs and self.bucket is None:
            # The error does not show the value, which may contain credentials by mistake.
            raise ValueError(
                "blobs must be a folder or s3://BUCKET/PREFIX, in letters, digits, '-', '_' and '.'; credentials and "
                "endpoint come from AWS's environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
            )

    @property
    def metrics_over_tls(self) -> bool:
        """Whether the metrics' port speaks TLS: on loopback nobody is on the way."""
        return bool(self.tls_certificate) and not is_loopback(self.metrics_host)

    @property
    def downloads(self) -> int:
        """How many files may be sent to strangers at once by each web process: of its pages, and the API's description.

        Demo and documentation have as many threads of their own; without them they are a part of `threads`.
        """
        return DEMO_DOWNLOADS if self.demo or self.docs else max(1, self.threads // 4)

    @property
    def working_threads(self) -> int:
        """How many requests each web process works on at once, with those of its pages."""
        return self.threads + (DEMO_DOWNLOADS if self.demo or self.docs else 0)

    @property
    def all_threads(self) -> int:
        """The threads of each web process, with those of the check-ins that it keeps back and of open pages."""
        return self.working_threads + (self.held_check_ins if self.hold_seconds else 0) + self.live_pages

    @property
    def longest_hold(self) -> float:
        """How long a check-in is kept back at most, in seconds; longer, and the device would be taken for gone."""
        return min(self.hold_seconds, 1.5 * self.check_in_window)

    @property
    def database_url(self) -> str:
        """SQLAlchemy's URL of the database."""
        return self.database or f"sqlite:///{self.path('archipel.db')}"

    @property
    def blob_folder(self) -> Path:
        """The folder of the server's files if `bucket` is None."""
        return self.path(self.blobs)

    @property
    def bucket(self) -> tuple[str, str] | None:
        """Name of the object store's bucket and prefix of all keys; None if `blobs` is a folder."""
        match = _BUCKET.fullmatch(self.blobs)
        return (match[1], match[2] or "") if match else None

    @property
    def blob_cache(self) -> Path:
        """The cache of an object store's files. It may be deleted while the server is stopped."""
        return self.path("blob-cache")

    @property
    def insight_folder(self) -> Path:
        """What the dashboard shows of the inside of models. It may be deleted."""
        return self.path("insight")

    @property
    def bundle_folder(self) -> Path:
        """A cache of verified bundles, unpacked. It may be deleted."""
        return self.path("bundles")

    @property
    def request_log(self) -> Path:
        """The file with a line for each request."""
        return self.path("requests.log")

    @property
    def process_log(self) -> Path:
        """The output of the web and coordinator processes."""
        return self.path("server.log")

    @property
    def trusted_keys(self) -> list[bytes]:
        """`publisher_keys` as 32 bytes each."""
        return [bytes.fromhex(key) for key in self.publisher_keys]

    @property
    def enrolment_public_key(self) -> bytes:
        """`enrolment_key` as 32 bytes."""
        return bytes.fromhex(self.enrolment_key)

    @cached_property
    def private_key(self) -> Ed25519PrivateKey:
        """The server's private key. Raises ServerError if its file cannot be read."""
        try:
            return load_private_key(self.path(self.server_key))
        except BundleError as error:
            raise ServerError(f"server key: {error}") from None

    @cached_property
    def public_key(self) -> bytes:
        """Raw 32 bytes of the server key's public half."""
        return self.private_key.public_key().public_bytes_raw()

    @cached_property
    def challenge_key(self) -> bytes:
        """32 bytes, derived from the server key, that authenticate challenges. Raises as `private_key`."""
        return self._derived(b"archipel/v1/challenge-key")

    @cached_property
    def pseudonym_key(self) -> bytes:
        """32 bytes, derived from the server key, for pseudonyms of devices. Raises as `private_key`."""
        return self._derived(b"archipel/v1/pseudonym-key")

    @cached_property
    def noise_key(self) -> bytes:
        """32 bytes, derived from the server key, that seal kept noise. Raises as `private_key`."""
        return self._derived(b"archipel/v1/noise-key")

    @cached_property
    def login_key(self) -> bytes:
        """32 bytes, derived from the server key, that sign what browsers bring back from a provider of identities."""
        return self._derived(b"archipel/v1/login-key")

    def _derived(self, label: bytes) -> bytes:
        # HKDF with a label for each purpose, so that no key tells anything about another one.
        secret = self.private_key.private_bytes_raw()
        return HKDF(algorithm=SHA256(), length=32, salt=None, info=label).derive(secret)

    def path(self, name: str) -> Path:
        """A path of the data folder."""
        return Path(self.folder) / name

    def environment(self) -> dict[str, str]:
        """Environment variables with which `load_settings` of the same folder gives equal settings."""
        tables = {"upstream": self.upstream, "openid": self.openid}
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("folder", *tables)}
        for table, found in tables.items():
            if found is not None:
                values |= {f"{table}_{name}": value for name, value in msgspec.structs.asdict(found).items()}
        return {
            # In JSON, because a group of people at a provider of identities may have commas in its name.
            ENVIRONMENT_PREFIX + name.upper(): json.dumps(value) if isinstance(value, tuple) else str(value)
            for name, value in values.items()
        }


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; of names only `localhost` is known to be one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_settings(folder: Path | str, *, environment: Mapping[str, str] | None = None, **overrides: object) -> Settings:
    """Load the settings of a data folder.

    Arguments:
        folder: The data folder; the file is FOLDER/server.toml.
        environment: Variables that override the file, by default this process's.
        overrides: Settings by name that override both.

    Raises:
        ServerError: The file is missing, or a setting is unknown or wrong; the message names it.

    Example:
        settings = load_settings("server", port=8471)
    """
    folder = Path(folder).absolute()
    try:
        return settings_file.load(
            folder / SETTINGS_FILE,
            Settings,
            prefix=ENVIRONMENT_PREFIX,
            environment=os.environ if environment is None else environment,
            remedy="`archipel serve init` makes a data folder",
            given={**overrides, "folder": str(folder)},
            only_given={"folder": "is where this file lies and cannot be set"},
        )
    except ValueError as error:
        raise ServerError(str(error)) from None
