"""Makes an environment of Python with packages in it, once: `python scripts/environment.py FOLDER PACKAGE ...`.

For what must not be installed beside archipel: other engines, libraries with requirements of their own. Prints the
path of its Python. It is made anew when the packages, or --stamp, are not what it was made for. With --beside it also
sees the packages of the Python that runs this, and gets only what is missing there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

STAMP = ".installed"
MESSAGE_CHARACTERS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="+", help="what pip takes, options of pip too (after --)")
    parser.add_argument("--beside", action="store_true", help="see this Python's packages too")
    parser.add_argument("--stamp", help="in place of the packages: what decides whether it is made anew")
    options = parser.parse_args()
    place = options.folder.absolute()
    made, wanted = place / STAMP, options.stamp or "\n".join(options.packages)
    python = place / "bin" / "python"
    if not made.exists() or made.read_text() != wanted:
        print(f"installing {', '.join(options.packages)} in {place}", file=sys.stderr)
        venv.create(place, with_pip=True, clear=True)
        if options.beside:
            (site,) = place.glob("lib/python*/site-packages")
            (site / "beside.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options.packages]
        done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, env=clean(), check=False)
        if done.returncode:
            print(f"{place.name}: pip says: {' '.join(done.stderr.split())[-MESSAGE_CHARACTERS:]}", file=sys.stderr)
            return 1
        made.write_text(wanted)
    print(python)
    return 0


def clean() -> dict[str, str]:
    """This process's variables without those that would lead another Python to this one's packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


if __name__ == "__main__":
    sys.exit(main())
