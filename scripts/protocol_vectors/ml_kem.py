"""ML-KEM-768 by FIPS 203, step by step: a second implementation, and one whose encapsulation is given its randomness.

For vectors and tests alone: it is slow, and its time tells of its secrets. Polynomials are rows of 256 coefficients
modulo 3329. Algorithms have the numbers of the standard.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Q, N, K = 3329, 256, 3
ETA, DU, DV = 2, 10, 4
Poly = NDArray[np.int64]


def _bits_reversed(number: int) -> int:
    return int(f"{number:07b}"[::-1], 2)


ZETAS = [pow(17, _bits_reversed(i), Q) for i in range(128)]
GAMMAS = np.array([pow(17, 2 * _bits_reversed(i) + 1, Q) for i in range(128)])


def make_keys(seed: bytes) -> tuple[bytes, bytes]:
    """The encapsulation key and the decapsulation key of d || z (algorithm 16)."""
    d, z = seed[:32], seed[32:]
    rho, sigma = _g(d + bytes([K]))
    matrix = _matrix(rho)
    secret = np.stack([_ntt(_noise(sigma, index)) for index in range(K)])
    error = np.stack([_ntt(_noise(sigma, K + index)) for index in range(K)])
    public = (_multiply(matrix, secret[None]).sum(axis=1) + error) % Q
    ek = b"".join(_encode(row, 12) for row in public) + rho
    dk = b"".join(_encode(row, 12) for row in secret)
    return ek, dk + ek + hashlib.sha3_256(ek).digest() + z


def encapsulate(ek: bytes, randomness: bytes) -> tuple[bytes, bytes]:
    """K and the ciphertext, from 32 random bytes (algorithm 17)."""
    shared, coins = _g(randomness + hashlib.sha3_256(ek).digest())
    return shared, _encrypt(ek, randomness, coins)


def decapsulate(dk: bytes, ciphertext: bytes) -> bytes:
    """K (algorithm 18)."""
    secret, ek = dk[: 384 * K], dk[384 * K : 768 * K + 32]
    digest, z = dk[768 * K + 32 : 768 * K + 64], dk[768 * K + 64 :]
    message = _decrypt(secret, ciphertext)
    shared, coins = _g(message + digest)
    rejected = hashlib.shake_256(z + ciphertext).digest(32)
    return shared if _encrypt(ek, message, coins) == ciphertext else rejected


def _encrypt(ek: bytes, message: bytes, coins: bytes) -> bytes:
    # Algorithm 14.
    public = np.stack([_decode(ek[384 * i : 384 * (i + 1)], 12) for i in range(K)])
    matrix = _matrix(ek[384 * K :])
    y = np.stack([_ntt(_noise(coins, index)) for index in range(K)])
    e1 = np.stack([_noise(coins, K + index) for index in range(K)])
    e2 = _noise(coins, 2 * K)
    products = _multiply(matrix.transpose(1, 0, 2), y[None]).sum(axis=1) % Q
    u = (np.stack([_inverse_ntt(row) for row in products]) + e1) % Q
    mu = _decompress(_decode(message, 1), 1)
    v = (_inverse_ntt(_multiply(public, y).sum(axis=0) % Q) + e2 + mu) % Q
    return b"".join(_encode(_compress(row, DU), DU) for row in u) + _encode(_compress(v, DV), DV)


def _decrypt(secret: bytes, ciphertext: bytes) -> bytes:
    # Algorithm 15.
    size = 32 * DU
    u = np.stack([_decompress(_decode(ciphertext[size * i : size * (i + 1)], DU), DU) for i in range(K)])
    v = _decompress(_decode(ciphertext[size * K :], DV), DV)
    s = np.stack([_decode(secret[384 * i : 384 * (i + 1)], 12) for i in range(K)])
    product = _multiply(s, np.stack([_ntt(row) for row in u])).sum(axis=0) % Q
    return _encode(_compress((v - _inverse_ntt(product)) % Q, 1), 1)


def _g(data: bytes) -> tuple[bytes, bytes]:
    digest = hashlib.sha3_512(data).digest()
    return digest[:32], digest[32:]


def _matrix(rho: bytes) -> Poly:
    return np.stack([np.stack([_uniform(rho + bytes([j, i])) for j in range(K)]) for i in range(K)])


def _uniform(seed: bytes) -> Poly:
    # Algorithm 7: three bytes are two candidates.
    stream = np.frombuffer(hashlib.shake_128(seed).digest(3 * 1024), np.uint8).astype(np.int64).reshape(-1, 3)
    low, high = stream[:, 0] + 256 * (stream[:, 1] % 16), stream[:, 1] // 16 + 16 * stream[:, 2]
    candidates = np.stack([low, high], axis=1).ravel()
    return candidates[candidates < Q][:N]


def _noise(seed: bytes, index: int) -> Poly:
    # Algorithm 8, of PRF.
    data = hashlib.shake_256(seed + bytes([index])).digest(64 * ETA)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.int64).reshape(N, 2 * ETA)
    return (bits[:, :ETA].sum(axis=1) - bits[:, ETA:].sum(axis=1)) % Q


def _ntt(poly: Poly) -> Poly:
    # Algorithm 9.
    values, index, length = poly.copy(), 1, 128
    while length >= 2:
        for start in range(0, N, 2 * length):
            zeta = ZETAS[index]
            index += 1
            turned = zeta * values[start + length : start + 2 * length] % Q
            values[start + length : start + 2 * length] = (values[start : start + length] - turned) % Q
            values[start : start + length] = (values[start : start + length] + turned) % Q
        length //= 2
    return values


def _inverse_ntt(poly: Poly) -> Poly:
    # Algorithm 10.
    values, index, length = poly.copy(), 127, 2
    while length <= 128:
        for start in range(0, N, 2 * length):
            zeta = ZETAS[index]
            index -= 1
            first = values[start : start + length].copy()
            second = values[start + length : start + 2 * length].copy()
            values[start : start + length] = (first + second) % Q
            values[start + length : start + 2 * length] = zeta * (second - first) % Q
        length *= 2
    return values * 3303 % Q


def _multiply(one: Poly, other: Poly) -> Poly:
    # Algorithms 11 and 12, for the last axis.
    a0, a1, b0, b1 = one[..., ::2], one[..., 1::2], other[..., ::2], other[..., 1::2]
    even = (a0 * b0 + a1 * b1 % Q * GAMMAS) % Q
    odd = (a0 * b1 + a1 * b0) % Q
    return np.stack([even, odd], axis=-1).reshape(*even.shape[:-1], N)


def _compress(poly: Poly, bits: int) -> Poly:
    # Rounded half up.
    return ((poly << bits) + Q // 2) // Q % (1 << bits)


def _decompress(poly: Poly, bits: int) -> Poly:
    return (poly * Q + (1 << (bits - 1))) >> bits


def _encode(poly: Poly, bits: int) -> bytes:
    # Algorithm 5.
    places = (poly[:, None] >> np.arange(bits)) & 1
    return np.packbits(places.astype(np.uint8).ravel(), bitorder="little").tobytes()


def _decode(data: bytes, bits: int) -> Poly:
    # Algorithm 6.
    places = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.int64).reshape(-1, bits)
    found: Poly = (places << np.arange(bits)).sum(axis=1)
    return found % Q if bits == 12 else found
