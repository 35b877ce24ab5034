"""examples/physics: the equations' exact solutions, the derivatives in the loss, and a short run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "physics"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example's run module, and through it the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import run

        yield run


@pytest.mark.parametrize("name", ["heat", "burgers"])
def test_the_exact_solution_solves_the_equation(example: ModuleType, name: str) -> None:
    """By differences of fourth order, away from the front of Burgers' solution."""
    problem, step = example.PROBLEMS[name], 1e-3
    x, t = np.array([-0.6, -0.25, 0.35, 0.7]) if name == "burgers" else np.array([0.1, 0.4, 0.8]), 0.3

    def u(dx: float = 0.0, dt: float = 0.0) -> np.ndarray:
        return problem.exact(x + dx, np.full_like(x, t + dt))

    def slope(along: str) -> np.ndarray:
        at = [u(**{along: k * step}) for k in (-2, -1, 1, 2)]
        return (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * step)

    u_xx = (-u(2 * step) + 16 * u(step) - 30 * u() + 16 * u(-step) - u(-2 * step)) / (12 * step**2)
    diffusion = 0.4 if name == "heat" else 0.01 / np.pi
    advection = u() * slope("dx") if name == "burgers" else 0.0
    np.testing.assert_allclose(slope("dt") + advection, diffusion * u_xx, atol=2e-4)
    start = np.linspace(problem.low, problem.high, 7)
    np.testing.assert_allclose(problem.exact(start, np.full(7, 1e-9)), problem.initial(start), atol=1e-5)


@pytest.mark.sampled(every=3)
def test_the_derivatives_are_those_of_torch(example: ModuleType) -> None:
    from network import network, weights, with_derivatives

    values, rng = weights(seed=3), np.random.default_rng(0)
    x = rng.uniform(-1, 1, (7, 2)).astype(np.float32)
    session = onnxruntime.InferenceSession(with_derivatives(network(values)).to_bytes())
    found = dict(zip([port.name for port in session.get_outputs()], session.run(None, {"x": x})))
    point = torch.from_numpy(x).double().requires_grad_()
    h, layers = point, len(values) // 2
    for i in range(layers):
        h = h @ torch.from_numpy(values[f"w{i}"]).double() + torch.from_numpy(values[f"b{i}"]).double()
        h = torch.tanh(h) if i < layers - 1 else h
    (first,) = torch.autograd.grad(h.sum(), point, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), point)
    expected = {"u": h, "u_x": first[:, :1], "u_t": first[:, 1:], "u_xx": second[:, :1]}
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.sampled(every=4)
def test_a_short_run(example: ModuleType, tmp_path: Path) -> None:
    """Training lowers the loss, and the file that is written is the network that was measured."""
    result = example.solve("heat", 40, 0, tmp_path, None)
    assert result["last loss"] < 0.7 * result["first loss"]
    places, exact = example.grid(example.PROBLEMS["heat"])
    session = onnxruntime.InferenceSession((tmp_path / "heat.onnx").read_bytes())
    assert example.error(session.run(["u"], {"x": places})[0], exact) == pytest.approx(result["error"], rel=1e-5)
    assert (tmp_path / "heat.png").is_file()


@pytest.mark.sampled(every=4)
def test_without_matplotlib_it_says_what_to_install(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["run.py", "--problem", "heat", "--steps", "2", "--out", str(tmp_path)])
    example.main()
    told = capsys.readouterr()
    assert "pip install matplotlib" in told.err
    assert "heat: 2 steps, loss 1.45 -> " in told.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heat.onnx", "results.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: expected at least 1"),
        (["--peer", "/no/python"], "--peer: [Errno 2] No such file"),
        (["--peer", "/bin/false"], "/bin/false has no DeepXDE; /bin/false -m pip install"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_the_training(
    arguments: list[str], message: str, example: ModuleType,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", ["run.py", *arguments])
    with pytest.raises(SystemExit):
        example.parse()
    assert message in capsys.readouterr().err
