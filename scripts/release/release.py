"""Make a release: wheels and sdist, the npm package, bills of materials, and SHA256SUMS over all of it.

    python scripts/release/release.py dist

The folder holds nothing else afterwards; one with files that no release has is refused. The same sources give the same
bytes (see wheels.py). Publishing is left to whoever has the credentials: `twine upload`, `npm publish`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

from sbom import write_bills
from wheels import ROOT, build_all

sys.path.append(str(ROOT / "scripts"))
from npm_package import pack

SUMS = "SHA256SUMS"
OURS = ("archipel-*", "archipel_data-*", "archipel_web_page-*", "archipel_docs-*", SUMS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        release(options.folder)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        print(f"release.py: {error}", file=sys.stderr)
        return 1
    print((options.folder / SUMS).read_text(), end="")
    return 0


def release(target: Path) -> None:
    """Make everything in `target`, in place of an earlier release there.

    Raises ValueError for a folder with other files or a tool that cannot do its part, CalledProcessError, OSError.
    """
    target.mkdir(parents=True, exist_ok=True)
    old = {path for pattern in OURS for path in target.glob(pattern) if path.is_file()}
    if foreign := sorted(path.name for path in set(target.iterdir()) - old):
        raise ValueError(f"{target}: has files of no release: {', '.join(foreign)}; name an empty folder")
    for path in old:
        path.unlink()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    build_all(target)
    pack(target)
    write_bills(target, version)
    files = sorted(path for path in target.iterdir())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (target / SUMS).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
