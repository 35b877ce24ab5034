"""The manifest: what a bundle contains, in canonical JSON. Decoding is strict, and every rule has its own error."""

from __future__ import annotations

from typing import Literal

import msgspec

from archipel.bundle.roles import DType, Program
from archipel.bundle.validation import MANIFEST_FILE as MANIFEST_FILE
from archipel.bundle.validation import MAX_TENSOR_BYTES as MAX_TENSOR_BYTES
from archipel.bundle.validation import SIGNATURE_FILE as SIGNATURE_FILE
from archipel.bundle.validation import check_file_name as check_file_name
from archipel.bundle.validation import validate_manifest
from archipel.errors import ManifestError, UnknownRoleError, UnknownVersionError

FORMAT_VERSION = 1
WEIGHTS_FILE = "weights.safetensors"

MAX_MANIFEST_BYTES = 4 << 20
ITEM_BYTES: dict[str, int] = {
    "float16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2,
    "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "bool": 1,
}  # fmt: skip


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    def __post_init__(self) -> None:
        # What equals its default is left out of the canonical JSON; msgspec leaves out what *is* its default.
        defaults = self.__struct_defaults__
        for name, default in zip(self.__struct_fields__[len(self.__struct_fields__) - len(defaults) :], defaults):
            if isinstance(default, str | tuple) and getattr(self, name) == default:
                msgspec.structs.force_setattr(self, name, default)


class TensorSpec(_Strict, frozen=True, kw_only=True):
    """A parameter, whose values are in weights.safetensors under the same name, with NumPy's name of its dtype.

    `sha256` is over its raw bytes (C order, little-endian).

    Example:
        for each in open_bundle("digits.bundle", trusted_keys).manifest.parameters:
            print(each.name, each.dtype, each.shape)  # head.weight float32 (3, 8)
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        size = ITEM_BYTES[self.dtype]
        for dim in self.shape:
            size *= dim
        return size


class Phase(_Strict, frozen=True, kw_only=True):
    """One part of a local round: run `program` for `epochs` or for `steps` (one of the two), in shuffled batches of
    `batch_size` examples.

    `moves` names the parameters and personal tensors that take their new values (None: all that the program writes).

    Example:
        for phase in open_bundle("digits.bundle", trusted_keys).manifest.schedule:
            print(phase.program, phase.epochs, phase.batch_size)  # train 1 10
    """

    program: str
    batch_size: int
    epochs: int | None = None
    steps: int | None = None
    moves: tuple[str, ...] | None = None


class SelfTest(_Strict, frozen=True, kw_only=True):
    """Examples and the outputs that `predict` must give for them, in the safetensors file `file`.

    Its tensors are `example/NAME` and `output/NAME` for every port of the program, with the same batch size. An output
    is right if each element differs by at most `atol + rtol * |expected|`. `source` says where the examples are from:
    "drawn" are pseudo-random numbers, "given" are the publisher's; "": not stated.

    Example:
        test = open_bundle("digits.bundle", trusted_keys).manifest.self_test
        print(test.file, test.rtol, test.atol)
    """

    file: str
    rtol: float
    atol: float
    source: Literal["", "drawn", "given"] = ""


class Limits(_Strict, frozen=True, kw_only=True):
    """The most that the programs need. Where the device's owner allows less, the device refuses the bundle.

    Arguments:
        peak_bytes: of memory: inputs, weights and the intermediate values that are alive together.
        flops_per_example: for one example of one step, two for each multiply-accumulate.
        upload_bytes: that the update of one round takes.

    Example:
        limits = open_bundle("digits.bundle", trusted_keys).manifest.limits
        print(limits.peak_bytes / 2**20, "MiB,", limits.flops_per_example, "FLOPs for one example")
    """

    peak_bytes: int
    flops_per_example: int
    upload_bytes: int


class Lineage(_Strict, frozen=True, kw_only=True):
    """Where the model comes from. `parent` is the digest of the bundle that it was made from; `recipe` has the
    parts of a compression, in their order; `metrics` are those that the maker measured.

    Example:
        Lineage(recipe=("static_int8",), metrics={"accuracy": 0.97})
    """

    parent: str | None = None
    recipe: tuple[str, ...] = ()
    metrics: dict[str, float] = {}


class Aggregators(_Strict, frozen=True, kw_only=True):
    """Bounds of rounds whose members are edge servers: each sends the sum of its own devices' updates.

    `min_cohort`, `threshold` and `colluders` are those of PrivacyPolicy, of the sites of one such round.

    Arguments:
        min_site_cohort: how many devices' updates the sum of one site has at least. That many hide each other whatever
            edges and servers above them do together.
        max_site_cohort: how many it has at most.
        min_cohort: how many sites a sum must have besides as many colluders as `colluders` allows.
        threshold: the smallest allowed ratio of secret-sharing threshold to the number of sites.
        colluders: the share of a round's sites that may work with the server above them.
        levels: how many levels of edge servers may be between the root and the devices, from 1 to 3.

    Example:
        sites = Aggregators(min_site_cohort=10, max_site_cohort=50, min_cohort=2, threshold=0.6)
    """

    min_site_cohort: int
    max_site_cohort: int
    min_cohort: int = 2
    threshold: float = 0.6
    colluders: float = 0.0
    levels: int = 1


class PrivacyPolicy(_Strict, frozen=True, kw_only=True):
    """Bounds set by the publisher; an agent refuses a plan outside them.

    Evaluations and analyses together are called queries.

    Arguments:
        modes: of rounds. In a plain round the server sees each update.
        min_cohort: how many devices a sum must have besides as many colluders as `colluders` allows; in a plain round
            it counts all devices.
        threshold: the smallest allowed ratio of secret-sharing threshold to cohort size, above 0.5 and at most 1.
        max_clip: the largest L2 norm of one device's deltas, and so how much they can tell about its data.
        max_bits: of an element of an update, from 2 to 30.
        colluders: the share of a secure round's `max_cohort` that may work with the server and still learn nothing but
            the sum.
        min_contributors: the sum of a query is released only with at least so many devices that have examples.
        queries: a device is in at most so many of them in `query_days` days.
        query_days: from 1 to 366.
        max_value: as `max_clip`, for each update entry of kind `value`: it bounds the clip, or range times the square
            root of the number of elements.
        max_server_lr: the largest factor by which the server multiplies a mean update, and so its steps.
        weighting: uniform: every device of a training weighs 1, so that none can lie about its weight.
        protocols: of secure rounds: over the complete graph of a cohort, and over few neighbours of each device, also
            with keys that resist quantum computers ("neighbours-mlkem").
        dropouts: the share of a cohort that a round over neighbours must withstand leaving before its end. `colluders`
            is there the share of the cohort as it is, and `threshold` says nothing.
        server: what a round over neighbours takes the server to be: one that does what it likes, or one that keeps to
            the protocol and keeps what it sees.
        noise_multiplier: of a training: devices add noise themselves, and that of the honest ones in a sum has at least
            this standard deviation, over the most by which one device can change the sum. 0: none is needed.
        aggregators: of rounds among edge servers; None: there are none with this bundle.

    Example:
        policy = PrivacyPolicy(modes=("secure",), min_cohort=10, threshold=0.67, max_clip=1.0, max_bits=16)
    """

    modes: tuple[Literal["secure", "plain"], ...]
    min_cohort: int
    threshold: float
    max_clip: float
    max_bits: int
    colluders: float = 1 / 3
    min_contributors: int = 20
    queries: int = 30
    query_days: int = 30
    max_value: float = 1e6
    max_server_lr: float = 1.0
    weighting: Literal["examples", "uniform"] = "examples"
    protocols: tuple[Literal["complete", "neighbours", "neighbours-mlkem"], ...] = ("complete",)
    dropouts: float = 0.2
    server: Literal["malicious", "semi-honest"] = "malicious"
    noise_multiplier: float = 0.0
    aggregators: Aggregators | None = None


class Statistic(_Strict, frozen=True, kw_only=True):
    """The meaning of sums of the `analyze` program `program`.

    The sums are its update outputs with the tensors NAME/sum (for sum and mean), NAME/count (for mean) and
    NAME/histogram. A histogram has len(edges) + 1 counts: below the first edge, between each two, from the last on.
    Quantiles, one for each of `probabilities`, are computed from a histogram.

    Example:
        print(Statistic(name="light", kind="mean", program="analyze").tensors)  # ('light/sum', 'light/count')
    """

    name: str
    kind: Literal["sum", "mean", "histogram", "quantiles"]
    program: str
    edges: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = ()

    def tensor(self, part: Literal["sum", "count", "histogram"]) -> str:
        """The name of the update's tensor with this part."""
        return f"{self.name}/{part}"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors whose sums it is computed from."""
        if self.kind == "mean":
            return self.tensor("sum"), self.tensor("count")
        return (self.tensor("sum" if self.kind == "sum" else "histogram"),)


class Manifest(_Strict, frozen=True, kw_only=True):
    """Everything about a bundle but its bytes. `files` maps every other file to its SHA-256 (hex).

    `format` is FORMAT_VERSION, `programs` are by name, `schedule` is the local round, `strategy` the algorithm's name.
    Devices adopt the bundle and take part in rounds with it until `not_after` (Unix seconds; 0: without end), and only
    where their population is one of `populations` (none: any). A publisher who raises `sequence` ends this for all
    earlier bundles of the same name: devices refuse a smaller one than they have seen. All of them can still predict.

    `source` is the file of the model as it was converted, in float, with its source's names: `archipel export` reads
    it, no device runs it. "" where the bundle only predicts.

    Example:
        manifest = open_bundle("digits.bundle", trusted_keys).manifest
        print(manifest.privacy.modes, sum(each.nbytes for each in manifest.parameters), "bytes of parameters")
    """

    format: int
    name: str
    programs: dict[str, Program]
    parameters: tuple[TensorSpec, ...]
    limits: Limits
    privacy: PrivacyPolicy
    files: dict[str, str]
    schedule: tuple[Phase, ...] = ()
    self_test: SelfTest | None = None
    statistics: tuple[Statistic, ...] = ()
    strategy: str = ""
    lineage: Lineage = Lineage()
    sequence: int = 0
    not_after: int = 0
    populations: tuple[str, ...] = ()
    source: str = ""


class _Header(msgspec.Struct):
    format: int


_DECODER = msgspec.json.Decoder(Manifest)
_HEADER_DECODER = msgspec.json.Decoder(_Header)
_ENCODER = msgspec.json.Encoder(order="sorted")


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest in canonical JSON: keys sorted, no white space, default values left out.

    Raises what `validate_manifest` raises, and ManifestError for a manifest of more than 4 MiB.

    Example:
        assert decode_manifest(encode_manifest(old.manifest)) == old.manifest
    """
    validate_manifest(manifest)
    data = _ENCODER.encode(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest: {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}")
    return data


def decode_manifest(data: bytes) -> Manifest:
    """Decode and validate a manifest. Raises a ManifestError that says what is wrong, and where.

    Example:
        unpack("digits.bundle", "unpacked")
        manifest = decode_manifest(Path("unpacked/manifest.json").read_bytes())
        print(manifest.name, sorted(manifest.programs))
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest: {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}")
    # The format alone first: a manifest of a later format must say so, and not fail at a field that is unknown here.
    try:
        header = _HEADER_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"manifest: {error}") from None
    if header.format != FORMAT_VERSION:
        raise UnknownVersionError(
            f"manifest: format {header.format}, this installation reads format {FORMAT_VERSION}; update archipel"
        )
    try:
        manifest = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        if ".role" in str(error) or "`role`" in str(error):
            raise UnknownRoleError(f"manifest: {error}; a role is one of the table in docs/design.md") from None
        raise ManifestError(f"manifest: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"manifest: {error}") from None
    validate_manifest(manifest)
    # One manifest, one digest: bundles are compared and named by the SHA-256 of these bytes.
    if _ENCODER.encode(manifest) != data:
        raise ManifestError("manifest: not canonical JSON (sorted keys, no white space, defaults left out)")
    return manifest
