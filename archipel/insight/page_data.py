"""What a page shows, as values for JSON. Nodes, values and tensors name each other by their place in a list.

Names and texts come from models of anybody; they are plain text here, and the page puts them in as text alone.
"""

from __future__ import annotations

import msgspec

Dim = int | str | None


class TensorStatistics(msgspec.Struct, kw_only=True):
    """What the numbers of one tensor are.

    `zeros` is the share of zeros, 0 to 1; `odd` counts numbers that are not finite, which the others leave out.
    `counts` are how many numbers lie in each of equally wide bins from `low` to `high`. `sample` has all numbers of a
    small tensor, as text.
    """

    count: int
    mean: float | None = None
    deviation: float | None = None
    low: float | None = None
    high: float | None = None
    zeros: float | None = None
    odd: int = 0
    counts: list[int] = []
    sample: list[str] = []


class ValueData(msgspec.Struct, kw_only=True):
    """A value of a graph. `kind`: input, output, weight, state (what an input of a program keeps), constant or inner.

    `bytes` is with the batch of the page, None where the size has no bound. `producer` is the place of a node, -1 for
    none; `statistics` are those of a tensor that is stored. `role` is the port's of a program.
    """

    name: str
    kind: str
    dtype: str = ""
    shape: list[Dim] | None = None
    bytes: int | None = None
    producer: int = -1
    role: str = ""
    statistics: TensorStatistics | None = None


class NodeData(msgspec.Struct, kw_only=True):
    """A node; `inputs` and `outputs` are places of values, -1 for an input that is left out.

    `scope` is the place of a scope. `attributes` are (name, type, text). `feeds` are further values that the node
    waits for: what its bodies give back.
    """

    name: str
    op: str
    domain: str = ""
    scope: int = 0
    inputs: list[int]
    outputs: list[int]
    feeds: list[int] = []
    attributes: list[tuple[str, str, str]] = []
    flops: int = 0


class ScopeData(msgspec.Struct, kw_only=True):
    """A scope, such as block1 in block1/conv: its own name, and the place of the one around it (-1: the first)."""

    name: str
    parent: int = -1


class MemoryStep(msgspec.Struct, kw_only=True, array_like=True):
    """A node as it runs: its place, and how many bytes of activations are alive while it runs."""

    node: int
    bytes: int


class MemoryPlan(msgspec.Struct, kw_only=True):
    """Bytes of activations over the nodes in the order in which ONNX Runtime runs them.

    `peak` is the most of them, at step `peak_step`; `alive` are the values that are alive then, the largest first, with
    their bytes. `inputs` and `weights` are bytes that are there all the time, and are not in the steps. `batch`: what
    every symbolic dimension counts as; `unknown`: how many values have no known size, and count nothing.
    """

    batch: int
    steps: list[MemoryStep]
    peak: int
    peak_step: int
    alive: list[tuple[int, int]]
    inputs: int
    weights: int
    unknown: int = 0


class KernelRow(msgspec.Struct, kw_only=True):
    """A kernel in ONNX Runtime: median microseconds of a pass. `node` is a place in the graph, -1 where ONNX Runtime
    made the node itself."""

    name: str
    op: str
    node: int
    calls: float
    us: float
    share: float


class TimesData(msgspec.Struct, kw_only=True):
    """Times of operators, medians over `runs` passes; `wall_us` is a whole pass. `assumed` says in sentences what was
    taken for the inputs."""

    runs: int
    threads: int
    wall_us: float
    kernels: list[KernelRow]
    assumed: list[str]
    machine: str


class GraphData(msgspec.Struct, kw_only=True):
    """One graph: of an ONNX file, or of a program of a bundle. `notes` say what could not be found out, and why."""

    name: str
    kind: str = ""
    opset: str = ""
    nodes: list[NodeData]
    values: list[ValueData]
    inputs: list[int]
    outputs: list[int]
    scopes: list[ScopeData]
    memory: MemoryPlan | None = None
    times: TimesData | None = None
    notes: list[str] = []


class TensorData(msgspec.Struct, kw_only=True):
    """A tensor that a model stores, with its statistics."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    trained: bool = False
    statistics: TensorStatistics


class Subject(msgspec.Struct, kw_only=True):
    """A model: `kind` says what it was read from, `tensors` are its weights. `facts` are (what, text) for the first
    table, `notes` sentences for people.

    Example: see `archipel.insight.read_onnx`.
    """

    name: str
    kind: str
    facts: list[tuple[str, str]] = []
    graphs: list[GraphData] = []
    tensors: list[TensorData] = []
    notes: list[str] = []


class Curve(msgspec.Struct, kw_only=True):
    """Numbers over steps. `group` is the picture in which it is drawn, `run` the folder or file that it is from."""

    name: str
    group: str
    run: str = ""
    x: str = "step"
    steps: list[float]
    values: list[float | None]
    left_out: int = 0


class Histogram(msgspec.Struct, kw_only=True):
    """The numbers of a tensor at one step."""

    step: int
    label: str
    statistics: TensorStatistics


class HistogramSeries(msgspec.Struct, kw_only=True):
    """A tensor over the rounds; `kind` is weights, activations, or that of a log."""

    name: str
    kind: str
    steps: list[Histogram]


class Page(msgspec.Struct, kw_only=True):
    """All that a page shows: models (`subjects`), curves and histograms of runs, a comparison of two of the models.

    `version` is that of archipel; `notes` are sentences for people.

    Example: see `archipel.insight.render`.
    """

    title: str
    version: str
    subjects: list[Subject] = []
    curves: list[Curve] = []
    histograms: list[HistogramSeries] = []
    comparison: ComparisonData | None = None
    notes: list[str] = []


class NodeChange(msgspec.Struct, kw_only=True):
    """A node that only one of two graphs has, or both in different forms; `what` says how they differ."""

    kind: str
    name: str
    op: str
    what: list[str] = []
    a: int = -1
    b: int = -1


class TensorDistance(msgspec.Struct, kw_only=True):
    """How far a tensor of b is from that of a: L2 norm of the difference, the same over the norm of a's, the cosine,
    and the largest difference of two numbers. None where it is not defined; `what` says why."""

    name: str
    shape_a: list[int] | None = None
    shape_b: list[int] | None = None
    bytes_a: int = 0
    bytes_b: int = 0
    distance: float | None = None
    relative: float | None = None
    cosine: float | None = None
    largest: float | None = None
    what: str = ""


class OutputDifference(msgspec.Struct, kw_only=True):
    """A value that both models compute on the same inputs."""

    name: str
    counterpart: str
    layer: str
    output: bool
    cosine: float | None
    snr_db: float | None
    equal: bool
    largest: float | None
    what: str


class ComparisonData(msgspec.Struct, kw_only=True):
    """Two models. `graph_a` and `graph_b` are places in the graphs of the first and second subject."""

    graph_a: int
    graph_b: int
    nodes: list[NodeChange]
    same: int
    tensors: list[TensorDistance]
    outputs: list[OutputDifference] = []
    examples: int = 0
    assumed: list[str] = []
    notes: list[str] = []
