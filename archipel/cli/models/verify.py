"""`archipel verify`: check that a bundle is what its publisher signed, and that its content fits its manifest."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from archipel.bundle import Bundle, Limits, load_public_key
from archipel.bundle.release import is_release
from archipel.bundle.roles import Example
from archipel.cli.input_output.arrays import check_fields, read_fields
from archipel.cli.input_output.publisher_keys import publisher_keys
from archipel.cli.models.agreement import AgreementOptions, agreement_lines, agreement_options
from archipel.cli.models.bundles import open_verified, read_program
from archipel.errors import (
    ArchipelError,
    ArchiveError,
    BundleError,
    CommandError,
    DelegateError,
    DigestError,
    GraphError,
    ManifestError,
    MissingExtraError,
    RuntimeInputError,
    RuntimeProgramError,
    SelfTestError,
    SignatureError,
    TensorLayoutError,
    UnsafeGraphError,
    UnsafePathError,
)

# The checks in the order in which `open_bundle` makes them, and the errors of each. The first error ends the opening:
# all checks before it have passed, and all after it were not reached.
_OPENING: tuple[tuple[str, tuple[type[BundleError], ...]], ...] = (
    ("archive", (ArchiveError,)),
    ("signature", (SignatureError,)),
    ("manifest", (ManifestError,)),
    ("digests", (DigestError, UnsafePathError)),
    ("parameters", (TensorLayoutError,)),
    ("graphs", (UnsafeGraphError,)),
)

_RECALIBRATE = "convert the model with calibration examples like those of devices"


@dataclass(frozen=True)
class Check:
    """The result of one check: `good` is None where the check could not be made. `text` gives reason or details."""

    name: str
    good: bool | None
    text: str

    def __str__(self) -> str:
        word = {True: "ok", False: "FAILED", None: "skipped"}[self.good]
        return f"{word:<9}{self.name}: {self.text}"


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@publisher_keys
@click.option("--no-run", is_flag=True, help="Leave out the self-test and --data, which predict.")
@click.option("--data", type=click.Path(path_type=Path),
              help="Examples like those of devices (.npz or .npy; labels are not read), on which what the bundle "
              "predicts is compared with what devices train.")  # fmt: skip
@agreement_options
@click.option("--json", "as_json", is_flag=True, help="Print the checks as one JSON object.")
def verify(
    bundle: Path,
    key_files: tuple[Path, ...],
    no_run: bool,
    data: Path | None,
    agreement: AgreementOptions,
    as_json: bool,
) -> None:
    """Check BUNDLE (a file, a folder, or a release), one line for each check. Exit code 1 means that a check failed.

    \b
    archipel verify digits.bundle --key publisher.pub
    archipel verify digits.bundle --key publisher.pub --no-run --json
    archipel verify digits.bundle --key publisher.pub --data test.npz

    The checks: the signature, the digests of all files and the declared parameters are right; every graph loads into
    the installed ONNX Runtime; the signed limits are not below what the graphs need, computed again (with the extra
    `convert`); and predictions equal those of the self-test in the bundle. The self-test shows that this machine
    predicts what the publisher's did, for a few inputs. Agreement is how far a compressed bundle predicts what its
    float parameters answer: as the conversion measured it, or measured here with --data. Below --min-agreement or
    --min-snr it is a failed check. Of a release it checks the
    signature and every bundle, which must be there, be the one that was released, and cost what the release says.
    """

    def check(opened: Bundle) -> list[Check]:
        found = check_contents(opened, run=not no_run)
        if data is None:
            return [*found, *_check_recorded_agreement(opened, agreement)]
        return [*found, _check_agreement(opened, found, data, agreement, run=not no_run)]

    with tempfile.TemporaryDirectory() as folder:
        name, digest = None, None
        if is_release(bundle):
            from archipel.cli.models.releases import check_release

            checks, signed = check_release(bundle, key_files, folder, check)
            if signed is not None:
                name, digest = signed.release.name, signed.digest
        else:
            checks, opened = check_opening(bundle, key_files, folder)
            if opened is not None:
                checks += check(opened)
                name, digest = opened.manifest.name, opened.digest
        failed = [check for check in checks if check.good is False]
        if as_json:
            answer = {
                "bundle": str(bundle),
                "name": name,
                "digest": digest,
                "good": not failed,
                "checks": [asdict(check) for check in checks],
            }
            click.echo(json.dumps(answer))
        else:
            click.echo("\n".join(map(str, checks)))
        if failed:
            wrong = "; ".join(f"{check.name}: {check.text}" for check in failed)
            raise CommandError(f"{bundle}: {len(failed)} of {len(checks)} checks failed: {wrong}")
        if not as_json:
            click.echo(f"{bundle}: good; {name!r}, digest {digest}")


def check_opening(path: Path, key_files: Sequence[Path], folder: str) -> tuple[list[Check], Bundle | None]:
    """Verify a bundle, step by step.

    Arguments:
        path: the bundle, a folder or a .bundle file.
        key_files: public keys of publishers; the signature of one of them is enough.
        folder: an existing folder that a .bundle file is unpacked below.

    Returns:
        The checks, and the bundle, which is None where a check failed.

    Raises:
        BundleError: there is no such path.
        CommandError: a key cannot be read, or no key was given.
    """
    if not path.exists():
        raise BundleError(f"{path}: no such bundle (expected a folder or a .bundle file)")
    for file in key_files:
        if not file.is_file():
            raise CommandError(f"{file}: no such key; give the FILE.pub that `archipel keys` wrote")
        try:
            load_public_key(file)
        except SignatureError as error:
            raise CommandError(f"{error}; give the FILE.pub that `archipel keys` wrote") from None
    try:
        bundle = open_verified(path, key_files, folder)
    except BundleError as error:
        names = [name for name, _ in _OPENING]
        # An error of no class in the table counts as the first check's.
        at = next((place for place, (_, kinds) in enumerate(_OPENING) if isinstance(error, kinds)), 0)
        before = [Check(name, True, "good") for name in names[:at]]
        left = [Check(name, None, "not reached") for name in names[at + 1 :]]
        return [*before, Check(names[at], False, str(error)), *left], None
    manifest = bundle.manifest
    size = sum((bundle.folder / name).stat().st_size for name in manifest.files)
    values = sum(spec.nbytes for spec in manifest.parameters)
    texts = {
        "archive": "a folder" if path.is_dir() else f"{path.stat().st_size:,} bytes",
        "signature": f"by one of {len(key_files)} keys"
        if len(key_files) > 1
        else f"by {key_files[0] if key_files else 'your development key'}",
        "manifest": f"format {manifest.format}, {len(manifest.programs)} programs",
        "digests": f"{len(manifest.files)} files, {size:,} bytes",
        "parameters": f"{len(manifest.parameters)} tensors, {values:,} bytes",
        "graphs": "they use standard operators, and no file but the bundle's weights",
    }
    return [Check(name, True, text) for name, text in texts.items()], bundle


def check_contents(bundle: Bundle, run: bool = True) -> list[Check]:
    """The checks of a bundle whose publisher is trusted: graphs, limits, and with `run` the self-test."""
    graphs = list(_check_programs(bundle))
    checks = [*graphs, _check_limits(bundle), *_check_card(bundle)]
    if not any(program.kind == "predict" for program in bundle.manifest.programs.values()):
        return [*checks, Check("self-test", None, "there is no predict program")]
    if not run:
        return [*checks, Check("self-test", None, "left out (--no-run)")]
    if any(graph.good is False for graph in graphs):
        return [*checks, Check("self-test", None, "not reached")]
    return [*checks, _check_answers(bundle)]


def _check_programs(bundle: Bundle) -> Iterator[Check]:
    import onnxruntime

    from archipel.lite_runtime.engines.sessions import Sessions

    sessions = Sessions(bundle, delegates=["cpu"])
    for name in sorted(bundle.manifest.programs):
        try:
            sessions.open(name)
        except (RuntimeProgramError, DelegateError) as error:
            yield Check(f"program {name}", False, str(error))
        else:
            yield Check(f"program {name}", True, f"valid for ONNX Runtime {onnxruntime.__version__}")


def _check_card(bundle: Bundle) -> list[Check]:
    """Whether the model card can be read; no check where there is none."""
    try:
        return [] if bundle.card is None else [Check("card", True, bundle.card.name)]
    except BundleError as error:
        return [Check("card", False, str(error))]


def _check_limits(bundle: Bundle) -> Check:
    signed = bundle.manifest.limits
    # Bundles that do not train name no batch size. Every limit covers at least one example.
    batch = max((phase.batch_size for phase in bundle.manifest.schedule), default=1)
    try:
        computed = compute(bundle, batch)
    except MissingExtraError as error:
        return Check("limits", None, f"not computed again: {error}")
    except (GraphError, ArchipelError) as error:
        return Check("limits", False, f"cannot be computed: {error}")
    names = {"peak_bytes": "peak bytes", "flops_per_example": "FLOPs per example", "upload_bytes": "upload bytes"}
    pairs = {text: (getattr(signed, field), getattr(computed, field)) for field, text in names.items()}
    low = [
        f"{text}: signed {limit:,}, the graphs need {need:,}" for text, (limit, need) in pairs.items() if limit < need
    ]
    if low:
        return Check("limits", False, f"too low for batches of {batch}: {'; '.join(low)}; convert the model again")
    margins = ", ".join(f"{text} {need:,} of {limit:,}" for text, (limit, need) in pairs.items())
    return Check("limits", True, f"computed again for batches of {batch}: {margins}")


def compute(bundle: Bundle, batch_size: int) -> Limits:
    """Compute the limits from the bundle's graphs. Raises MissingExtraError without the extra, ArchipelError."""
    programs = {name: read_program(bundle, name) for name in bundle.manifest.programs}
    from archipel.converter.limits import compute_limits

    return compute_limits(programs, batch_size)


def _check_recorded_agreement(bundle: Bundle, bounds: AgreementOptions) -> list[Check]:
    """Whether the agreement that the conversion measured is within the bounds; no check where it had no examples."""
    metrics = bundle.manifest.lineage.metrics
    if low := bounds.low(metrics):
        return [Check("agreement", False, f"as the conversion measured, {'; '.join(low)}; {_RECALIBRATE}")]
    lines = agreement_lines(metrics)
    return [Check("agreement", True, f"as the conversion measured, {'; '.join(lines)}")] if lines else []


def _check_agreement(bundle: Bundle, before: Sequence[Check], path: Path, bounds: AgreementOptions, run: bool) -> Check:
    """Compare `predict` with the training form on the examples of a file. Raises CommandError for a wrong file."""
    from archipel.lite_runtime import Runtime
    from archipel.lite_runtime.agreement import measure_agreement

    name = "agreement"
    program = next((p for p in bundle.manifest.programs.values() if p.kind == "predict"), None)
    if program is None:
        return Check(name, None, "there is no predict program")
    arrays = read_fields(path, program.inputs)
    check_fields(path, program.inputs, arrays, Example)
    if not run or any(check.good is False for check in before):
        return Check(name, None, "not reached" if run else "left out (--no-run)")
    try:
        found = measure_agreement(Runtime(bundle, delegates=["cpu"]), arrays)
    except (RuntimeInputError, RuntimeProgramError) as error:
        return Check(name, False, f"{path}: {error}")
    if found is None:
        return Check(name, None, "devices do not train it, so there is no training form")
    good = found.good(bounds.min_agreement, bounds.min_snr)
    if good is False:
        least = f"{bounds.min_agreement:.1%}" if found.share is not None else f"{bounds.min_snr:g} dB"
        return Check(name, False, f"{found}, expected at least {least}; {_RECALIBRATE}")
    return Check(name, good, str(found))


def _check_answers(bundle: Bundle) -> Check:
    from archipel.lite_runtime import Runtime
    from archipel.lite_runtime.self_test import run_self_test

    try:
        report = run_self_test(Runtime(bundle, delegates=["cpu"]))
    except (SelfTestError, RuntimeProgramError) as error:
        return Check("self-test", False, str(error))
    return Check("self-test", True, str(report))
