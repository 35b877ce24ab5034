"""The catalogue: what there is in `archipel.models`, in one table that needs neither PyTorch nor ONNX."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from archipel import models
from archipel.bundle import CardMetric, ModelCard
from archipel.errors import CatalogueError
from archipel.models.drafts import draft_card

if TYPE_CHECKING:
    from torch import nn

Task = Literal[
    "image classification", "keyword spotting", "activity recognition", "next token", "text encoding", "segmentation",
    "reconstruction",
]  # fmt: skip
LICENCE = "Apache-2.0"
"""Of the code of every network here. Data that a network was trained on has its own, which the card states."""
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Field:
    """One input: its dtype and the shape of one example. Integers are from 0 to `below` - 1."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "int64"] = "float32"
    below: int = 0


@dataclass(frozen=True)
class Network:
    """A network of the catalogue, as its function makes it without other arguments than the seed.

    Attributes:
        name: of the function in `archipel.models`, which is `make`.
        task: what it is for.
        inputs: with the shape of one example.
        outputs: the shape of one example's answers, float32.
        parameters: how many numbers training moves.
        flops: for one example, two for each multiplication with its addition.
        peak_bytes: of weights, inputs and intermediate values that are alive together for one example.
        paper: where the network is from; "" where it follows none.
        licence: of its code here.
    """

    name: str
    make: Callable[..., nn.Module]
    task: Task
    inputs: tuple[Field, ...]
    outputs: tuple[tuple[int, ...], ...]
    parameters: int
    flops: int
    peak_bytes: int
    paper: str = ""
    licence: str = field(default=LICENCE, kw_only=True)

    def example(self, batch: int = 2, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Random inputs [batch, ...], one for each of `inputs`."""
        rng = np.random.default_rng(seed)
        return tuple(
            rng.integers(0, each.below, (batch, *each.shape))
            if each.dtype == "int64"
            else rng.standard_normal((batch, *each.shape), np.float32)
            for each in self.inputs
        )

    @property
    def recipe(self) -> Path | None:
        """The configuration with which `archipel train` trains the network; None where there is none."""
        path = _FOLDER / "recipes" / f"{self.name}.toml"
        return path if path.is_file() else None

    @property
    def variants(self) -> dict[str, Path]:
        """Recipes for other data, or for a smaller network: `recipes/NAME-VARIANT.toml` by what they are called."""
        return {path.stem.partition("-")[2]: path for path in sorted((_FOLDER / "recipes").glob(f"{self.name}-*.toml"))}

    @property
    def card(self) -> ModelCard | None:
        """What the recipe, or its variant in results.toml, reached on which data; None where nobody has trained it."""
        measured = _results().get(self.name)
        variant = "" if measured is None else measured.get("variant", "")
        path = self.variants.get(variant) if variant else self.recipe
        if measured is None or path is None:
            return None
        text = path.read_text(encoding="utf-8")
        option = f" --variant {variant}" if variant else ""
        command = f"archipel models show {self.name} --recipe{option} > {path.name}; archipel train {path.name}"
        metrics = [CardMetric(command=command, **each) for each in measured["metrics"]]
        return draft_card(
            tomllib.loads(text).get("card", {}),
            name=self.name,
            task=self.task,
            recipe=text,
            metrics=metrics,
            references=[self.paper] if self.paper else [],
            parameters=measured["parameters"],
        )


@cache
def _results() -> dict[str, Any]:
    """results.toml: for each network that a recipe has trained here its size in that recipe, and what was measured."""
    return tomllib.loads((_FOLDER / "results.toml").read_text(encoding="utf-8"))


def find(name: str) -> Network:
    """The network of that name. Raises CatalogueError, which names near ones.

    Example:
        network = catalogue.find("resnet18").make(0, classes=10, stem="small")
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    near = get_close_matches(name, CATALOGUE, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(CATALOGUE)}"
    raise CatalogueError(f"no network {name[:64]!r} in the catalogue; {hint}")


def _pictures(*shape: int) -> tuple[Field, ...]:
    return (Field("input", shape),)


def _tokens(name: str, length: int, below: int) -> Field:
    return Field(name, (length,), "int64", below)


_BERT = (_tokens("tokens", 128, 30522), _tokens("mask", 128, 2), _tokens("token_types", 128, 2))
_NETWORKS = (
    Network(
        "autoencoder", models.autoencoder, "reconstruction", _pictures(1, 28, 28), ((1, 28, 28),),
        53_473, 382_592, 229_652,
    ),
    Network(
        "bc_resnet", models.bc_resnet, "keyword spotting", _pictures(1, 40, 98), ((12,),),
        9_232, 4_816_880, 316_912, "Kim et al. 2021, arXiv:2106.04140",
    ),
    Network(
        "bert", models.bert, "text encoding", _BERT, ((128, 768), (768,)),
        109_482_240, 22_348_431_360, 449_729_312, "Devlin et al. 2019, arXiv:1810.04805",
    ),
    Network(
        "char_rnn", models.char_rnn, "next token", (_tokens("characters", 80, 80),), ((80, 80),),
        819_920, 130_416_640, 6_510_384, "Caldas et al. 2018, arXiv:1812.01097",
    ),
    Network(
        "cnn_1d", models.cnn_1d, "activity recognition", _pictures(6, 128), ((6,),),
        154_054, 3_375_872, 684_840,
    ),
    Network(
        "deep_conv_lstm", models.deep_conv_lstm, "activity recognition", (Field("x", (6, 128)),), ((6,),),
        458_054, 174_082_560, 3_845_796, "Ordóñez and Roggen 2016, doi:10.3390/s16010115",
    ),
    Network(
        "digits_cnn", models.digits_cnn, "image classification", _pictures(1, 28, 28), ((10,),),
        20_522, 674_048, 122_104, "after LeCun et al. 1998, doi:10.1109/5.726791",
    ),
    Network(
        "ds_cnn", models.ds_cnn, "keyword spotting", _pictures(1, 49, 10), ((12,),),
        23_180, 5_313_536, 165_624, "Zhang et al. 2017, arXiv:1711.07128",
    ),
    Network(
        "fedavg_cnn", models.fedavg_cnn, "image classification", _pictures(1, 28, 28), ((10,),),
        1_663_370, 24_546_304, 6_857_336, "McMahan et al. 2017, arXiv:1602.05629",
    ),
    Network(
        "gpt", models.gpt, "next token", (_tokens("tokens", 1024, 50257),), ((1024, 50257),),
        124_439_808, 291_648_307_200, 861_155_816, "Radford et al. 2019, Language Models are Unsupervised Multitask "
        "Learners",
    ),
    Network(
        "lenet", models.lenet, "image classification", _pictures(1, 28, 28), ((10,),),
        61_706, 833_040, 287_608, "LeCun et al. 1998, doi:10.1109/5.726791",
    ),
    Network(
        "mlp", models.mlp, "image classification", _pictures(784), ((10,),),
        199_210, 397_600, 801_576, "McMahan et al. 2017, arXiv:1602.05629",
    ),
    Network(
        "mobilenet_v2", models.mobilenet_v2, "image classification", _pictures(3, 32, 32), ((10,),),
        2_236_682, 175_952_896, 10_441_952, "Sandler et al. 2018, arXiv:1801.04381",
    ),
    Network(
        "resnet8", models.resnet8, "image classification", _pictures(3, 32, 32), ((10,),),
        77_946, 25_003_264, 523_592, "Banbury et al. 2021, arXiv:2106.07597",
    ),
    Network(
        "resnet18", models.resnet18, "image classification", _pictures(3, 224, 224), ((1000,),),
        11_689_512, 3_628_146_688, 53_840_320, "He et al. 2016, arXiv:1512.03385",
    ),
    Network(
        "resnet50", models.resnet50, "image classification", _pictures(3, 224, 224), ((1000,),),
        25_557_032, 8_178_368_512, 112_782_784, "He et al. 2016, arXiv:1512.03385",
    ),
    Network(
        "transformer", models.transformer, "next token", (_tokens("tokens", 64, 80),), ((64, 80),),
        425_552, 55_836_672, 2_161_600, "Vaswani et al. 2017, arXiv:1706.03762",
    ),
    Network(
        "unet", models.unet, "segmentation", (Field("x", (1, 64, 64)),), ((2, 64, 64),),
        29_786, 57_344_000, 921_960, "Ronneberger et al. 2015, arXiv:1505.04597",
    ),
)  # fmt: skip
CATALOGUE: Mapping[str, Network] = {network.name: network for network in _NETWORKS}
"""Every network by its name, in the order of the names."""
