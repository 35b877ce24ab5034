"""Make the npm package of the browser's runtime: web/src as plain JavaScript and declarations, packed by npm.

    python scripts/npm_package.py FOLDER

FOLDER gets `archipel-web-VERSION.tgz`, ready for `npm publish`. The version is the Python package's (pyproject.toml);
the rest of the package's description is web/package.json without what only its development needs. Node packages come
from web/node_modules, which `make npm` sets up.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT / "web"
OF_DEVELOPMENT = ("private", "scripts", "devDependencies")


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    print(pack(Path(sys.argv[1])))
    return 0


def pack(target: Path) -> Path:
    """Build the package and pack it; returns the archive in `target`. Raises CalledProcessError if a tool fails."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        compiler = (str(WEB / "node_modules" / ".bin" / "tsc"), "--project", str(WEB / "tsconfig.package.json"))
        # Editors show the comments of the declarations; in the code itself they would be a third of the package.
        for part in (("--emitDeclarationOnly",), ("--declaration", "false", "--removeComments")):
            run(*compiler, "--outDir", str(stage / "dist"), *part)
        for file in (WEB / "README.md", ROOT / "LICENSE"):
            shutil.copy(file, stage)
        (stage / "package.json").write_text(json.dumps(description(), indent=2) + "\n")
        name = run(
            "npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(target.resolve()), cwd=stage
        )
    return target / name.split()[-1]


def description() -> dict[str, object]:
    """What the published package.json says."""
    given = json.loads((WEB / "package.json").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    name = given.pop("name")
    return {"name": name, "version": version} | {
        key: value for key, value in given.items() if key not in OF_DEVELOPMENT
    }


def run(*command: str, cwd: Path = WEB) -> str:
    done = subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
