"""What a key exchange that resists quantum computers would add to a round over neighbours: bytes and microseconds.

    python benchmarks/key_exchange.py [--quick] [--json]

By the construction in docs/protocol-choices.md. One row for each operation, beside X25519's. Then for
each cohort what a device would send and receive more, with the sizes that `choose_sizes` gives: with envelopes alone,
and with masks as well. A mask's key K of ML-KEM has to be found from the secret of either device of its pair.
The one that drew the other encapsulates K to it, and leaves K sealed under a key from its own secret; this is carried
out once here, too.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from measure import arguments, print_alone, state_run

from archipel.protocol.secagg_plus.sizes import Assumptions, Server, choose_sizes

COMMITMENT_BYTES = 16
SERVERS: tuple[Server, ...] = ("semi-honest", "malicious")


@dataclass(frozen=True)
class Added:
    """Bytes that one device sends and receives more than today."""

    sent: int
    received: int


def main() -> None:
    options = arguments(__doc__).parse_args()
    state_run(options.json, ("cryptography",))
    key = MLKEM768PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    _, ciphertext = key.public_key().encapsulate()
    wrapped = wrap_and_recover()
    if not options.json:
        print(f"public key {len(public)}, ciphertext {len(ciphertext)}, K sealed {wrapped} bytes")
    for name, run in operations().items():
        microseconds = median_time(run, 50 if options.quick else 500)
        if options.json:
            print_alone("key exchange", name, us=microseconds)
        else:
            print(f"{name:46} {microseconds:7.1f} us")
    for devices in (1000, 10_000):
        for server in SERVERS:
            sizes = choose_sizes(devices, Assumptions(server=server))
            alone = for_envelopes(sizes.neighbours, len(public), len(ciphertext))
            masks = for_masks(sizes.partners, len(public), len(ciphertext), wrapped)
            both = Added(alone.sent + masks.sent, alone.received + masks.received)
            case = f"{devices} devices, {server}"
            if options.json:
                print_alone("key exchange", f"{case}, envelopes", sent_bytes=alone.sent, received_bytes=alone.received)
                print_alone("key exchange", f"{case}, both", sent_bytes=both.sent, received_bytes=both.received)
            else:
                print(f"{case}: envelopes {alone.sent:,} sent, {alone.received:,} received; both {both.sent:,} sent,"
                      f" {both.received:,} received")  # fmt: skip


def for_envelopes(neighbours: int, public: int, ciphertext: int) -> Added:
    """Of envelopes: a ciphertext in each, and a public key of each holder."""
    # A device is drawn by as many others, on average, as it draws.
    return Added(public + neighbours * ciphertext, neighbours * (public + ciphertext))


def for_masks(partners: int, public: int, ciphertext: int, wrapped: int) -> Added:
    """Of masks: for each partner drawn a ciphertext, K sealed for the device itself, and a commitment to K."""
    sent = public + partners * (ciphertext + wrapped + COMMITMENT_BYTES)
    return Added(sent, partners * (public + ciphertext + COMMITMENT_BYTES))


def wrap_and_recover() -> int:
    """The bytes of K sealed; raises RuntimeError unless the secret of either device gives the same K."""
    drawer, drawn = secrets.token_bytes(32), secrets.token_bytes(32)
    kem_key, ciphertext = from_secret(drawn).public_key().encapsulate()
    sealed = AESGCM(derive(drawer, b"wrap", 32)).encrypt(bytes(12), kem_key, b"")
    drawn_left = from_secret(drawn).decapsulate(ciphertext)
    drawer_left = AESGCM(derive(drawer, b"wrap", 32)).decrypt(bytes(12), sealed, b"")
    if not kem_key == drawn_left == drawer_left:
        raise RuntimeError("the secrets of the two devices give different keys")
    return len(sealed)


def from_secret(secret: bytes) -> MLKEM768PrivateKey:
    """The private key whose 64-byte seed follows from a device's shared secret of 32 bytes."""
    return MLKEM768PrivateKey.from_seed_bytes(derive(secret, b"ml-kem", 64))


def derive(secret: bytes, label: bytes, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=label).derive(secret)


def operations() -> dict[str, Callable[[], object]]:
    key, own, peer = (
        MLKEM768PrivateKey.generate(),
        X25519PrivateKey.generate(),
        X25519PrivateKey.generate().public_key(),
    )
    public, seed = key.public_key().public_bytes_raw(), key.private_bytes_raw()
    _, ciphertext = key.public_key().encapsulate()
    return {
        "X25519: generate": X25519PrivateKey.generate,
        "X25519: agree": lambda: own.exchange(peer),
        "ML-KEM-768: from a seed": lambda: MLKEM768PrivateKey.from_seed_bytes(seed),
        "ML-KEM-768: read a public key and encapsulate": lambda: MLKEM768PublicKey.from_public_bytes(
            public
        ).encapsulate(),
        "ML-KEM-768: decapsulate": lambda: key.decapsulate(ciphertext),
    }


def median_time(run: Callable[[], object], calls: int) -> float:
    """Microseconds of one call."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    main()
