"""`archipel bundle`, against a server over TCP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from archipel import bundle as b
from tests.cli.federation.test_remote import served  # noqa: F401  (a fixture)
from tests.support.tiny_bundle import make_bundle

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def digests(archipel: Command, served: Path) -> list[str]:  # noqa: F811
    """Of three bundles that the server has, the newest last."""
    key = b.load_private_key(served / "publisher.key")
    files = [served / "tiny.bundle", *(make_bundle(served, key, name=name) for name in ("second", "third"))]
    sent = [archipel("bundle", "upload", str(file), "--population", "pupils", "--json")[0] for file in files]
    return [json.loads(each)["digest"] for each in sent]


@pytest.mark.sampled(every=3)
def test_they_are_listed_newest_first(archipel: Command, digests: list[str], served: Path) -> None:  # noqa: F811
    head, *rows = archipel("bundle", "list")[0].splitlines()
    assert head.split() == ["bundle", "strategy", "bytes", "published", "digest"]
    assert [(row.split()[0], row.split()[-1]) for row in rows] == list(
        zip(("third", "second", "tiny"), reversed(digests))
    )
    assert rows[-1].split()[2] == str((served / "tiny.bundle").stat().st_size)
    (second,) = json.loads(archipel("bundle", "list", "--name", "second", "--json")[0])
    assert second["digest"] == digests[1]


@pytest.mark.sampled(every=3)
def test_one_is_fetched_by_the_beginning_of_its_digest(
    archipel: Command,
    digests: list[str],
    served: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    file = tmp_path / "again.bundle"
    for typed in (digests[0], digests[0][:12]):
        file.unlink(missing_ok=True)
        archipel("bundle", "download", typed, str(file))
        assert file.read_bytes() == (served / "tiny.bundle").read_bytes()
    assert "exists already" in archipel("bundle", "download", digests[0], str(file), code=1)[1]


@pytest.mark.sampled(every=3)
def test_what_is_refused_keeps_nothing(archipel: Command, digests: list[str], tmp_path: Path) -> None:
    broken, file = tmp_path / "broken.bundle", tmp_path / "new.bundle"
    broken.write_bytes(b"no bundle")
    assert str(broken) in archipel("bundle", "upload", str(broken), code=1)[1]
    assert "nothing.bundle" in archipel("bundle", "upload", str(tmp_path / "nothing.bundle"), code=1)[1]
    assert len(archipel("bundle", "list")[0].splitlines()) == 1 + len(digests)
    unknown = next(each * 8 for each in "0123456789abcdef" if not any(d.startswith(each * 8) for d in digests))
    said = archipel("bundle", "download", unknown, str(file), code=1)[1]
    assert f"{unknown}: the digest of no bundle begins so; `archipel bundle list` shows them" in said
    assert "64 hexadecimal digits" in archipel("bundle", "download", "tiny", str(file), code=1)[1]
    assert "no bundle" in archipel("bundle", "download", unknown * 8, str(file), code=1)[1]
    assert not file.exists()
