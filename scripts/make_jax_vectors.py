"""Writes what JAX says of twenty functions and their derivatives: `python scripts/make_jax_vectors.py [--check]`.

Into vectors/jax/derivatives.json, which tests/autodiff/test_jax.py compares with the same functions as ONNX graphs, so
that the tests need no JAX. Run it where JAX is: `python -m venv FOLDER` and `FOLDER/bin/pip install "jax[cpu]"`. With
--check it writes nothing, and fails where the file says something else (beyond rounding).

Each function takes `x` and constants and gives `y`. The file has, for f and s = sum of c y: the inputs, y, the gradient
of s, the derivative of y along v, the Hessian of s as a matrix, and the gradients of s at three points by vmap.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import erf, logsumexp

PATH = Path(__file__).resolve().parent.parent / "vectors" / "jax" / "derivatives.json"
LANES = 3

Array = jax.Array


def convolution(x: Array, w: Array) -> Array:
    return lax.conv_general_dilated(x, w, (2, 1), [(1, 1), (0, 2)])


def average(x: Array) -> Array:
    return lax.reduce_window(x**3, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4


def attention(x: Array, w: Array) -> Array:
    return jax.nn.softmax((x @ w) @ x.T, axis=-1) @ jnp.tanh(x)


def layer_norm(x: Array, w: Array) -> Array:
    away = x - x.mean(-1, keepdims=True)
    return away / jnp.sqrt((away**2).mean(-1, keepdims=True) + 0.5) * w


def recurrence(x: Array, w: Array) -> Array:
    def step(h: Array, item: Array) -> tuple[Array, Array]:
        h = jnp.tanh(item + h @ w)
        return h, h

    return lax.scan(step, jnp.zeros(x.shape[1]), x)[1]


def newton(x: Array) -> Array:
    """The square root of 1 + x^2 by three steps of Newton's method from 1."""
    return lax.fori_loop(0, 3, lambda _, r: (r + (1 + x * x) / r) / 2, jnp.ones_like(x))


def branches(x: Array) -> Array:
    return lax.cond(x.sum() > 0, lambda v: jnp.sin(v) * v, lambda v: jnp.exp(v) * v * v, x)


FUNCTIONS: dict[str, tuple[Callable[..., Array], list[tuple[int, ...]]]] = {
    "exp of sin": (lambda x: jnp.exp(jnp.sin(x)), [(4,)]),
    "rational": (lambda x: x / (1 + x * x), [(4,)]),
    "power": (lambda x: (1 + x * x) ** 1.7, [(4,)]),
    "log-sum-exp": (lambda x: logsumexp(x * x, axis=1), [(2, 3)]),
    "softmax": (lambda x: jax.nn.softmax(x, axis=0), [(3, 2)]),
    "log-softmax": (lambda x: jax.nn.log_softmax(jnp.sin(x), axis=-1), [(2, 3)]),
    "Gram matrix": (lambda x: x @ x.T, [(3, 2)]),
    "perceptron": (lambda x, w, b, v: jnp.tanh(x @ w + b) @ v, [(2, 3), (3, 4), (4,), (4, 2)]),
    "gelu": (lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))), [(5,)]),
    "layer norm": (layer_norm, [(2, 4), (4,)]),
    "convolution": (convolution, [(1, 2, 4, 3), (2, 2, 3, 2)]),
    "average pooling": (average, [(1, 2, 4, 2)]),
    "attention": (attention, [(3, 2), (2, 2)]),
    "where": (lambda x: jnp.where(x > 0.1, x**3, jnp.exp(x)), [(5,)]),
    "running sum": (lambda x: jnp.cumsum(x * x) * x, [(4,)]),
    "rows by index": (lambda x: jnp.take(x, jnp.array([2, 0, 0]), axis=0) ** 3, [(3, 2)]),
    "scattered sum": (lambda x: jnp.zeros(3).at[jnp.array([0, 2, 0, 1])].add(x**3) ** 2, [(4,)]),
    "largest times mean": (lambda x: x.max(1) * (x**2).mean(1), [(2, 3)]),
    "product of three": (lambda x, w: jnp.einsum("ij,jk,kl->il", x, w, x), [(2, 3), (3, 2)]),
    "unit vector": (lambda x: x / jnp.linalg.norm(x), [(4,)]),
    "Rosenbrock": (lambda x: 100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2, [(4,)]),
    "recurrence": (recurrence, [(3, 2), (2, 2)]),
    "Newton's method": (newton, [(3,)]),
    "branches": (branches, [(3,)]),
}


def answers(name: str) -> dict[str, object]:
    function, shapes = FUNCTIONS[name]
    rng = np.random.default_rng(list(name.encode()))
    x, *constants = (jnp.asarray(rng.uniform(-1.2, 1.2, shape).round(3)) for shape in shapes)
    y = function(x, *constants)
    c, v = (jnp.asarray(rng.uniform(-1, 1, like.shape).round(3)) for like in (y, x))
    points = jnp.asarray(rng.uniform(-1.2, 1.2, (LANES, *x.shape)).round(3))

    def scalar(point: Array) -> Array:
        return (c * function(point, *constants)).sum()

    moved = jax.jvp(lambda point: function(point, *constants), (x,), (v,))[1]
    found = {
        "x": x, "y": y, "c": c, "v": v, "points": points, "gradient": jax.grad(scalar)(x), "tangent": moved,
        "hessian": jax.hessian(scalar)(x).reshape(x.size, x.size), "gradients": jax.vmap(jax.grad(scalar))(points),
    }  # fmt: skip
    texts = {key: np.asarray(value).tolist() for key, value in found.items()}
    return {"constants": [np.asarray(k).tolist() for k in constants], **texts}


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    found = {name: answers(name) for name in FUNCTIONS}
    if "--check" not in sys.argv:
        PATH.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(part)}" for name, part in found.items())
        PATH.write_text(f"{{\n{lines}\n}}\n")
        return
    kept = json.loads(PATH.read_text())
    assert list(kept) == list(found), "the file has other functions"
    for name, part in found.items():
        for key, value in part.items():
            ours = kept[name][key]
            pairs = zip(value, ours, strict=True) if key == "constants" else [(value, ours)]  # type: ignore[call-overload]
            for new, old in pairs:
                np.testing.assert_allclose(new, old, rtol=1e-9, atol=1e-12, err_msg=f"{name}: {key}")
    print(f"{len(found)} functions: as in {PATH.name}, with JAX {jax.__version__}")


if __name__ == "__main__":
    main()
