"""Images built of the project's Dockerfiles by Buildah, and programs started in them as a container engine does.

The base of the Dockerfiles comes from a registry of images, which tests do without: debootstrap makes the same release
of Debian, and it gets the base's name. It also gets this machine's settings of pip, so that pip finds its index.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archipel.server.http.documentation import DOCS_FOLDER
from archipel.server.http.pages import PAGE_FOLDER
from tests.support.fixtures.chromium import needed

ROOT = Path(__file__).resolve().parents[2]
BASE, RELEASE = "docker.io/library/debian:13.2-slim", "trixie"
STORAGE = """\
[storage]
driver = "{driver}"
runroot = "{folder}/run"
graphroot = "{folder}/graph"
"""
START = """
set -e
mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro "$ROOT"
mount --rbind /proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount -t tmpfs tmpfs "$ROOT/tmp"
{volumes}
exec chroot "$ROOT" /usr/bin/env --ignore-environment {variables} \
    setpriv --reuid {user} --regid {group} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
    sh -c 'cd "$1" && shift && exec "$@"' sh {folder} "$@"
"""


@dataclass(frozen=True)
class Builder:
    """Buildah with a storage of its own in a folder."""

    folder: Path

    def run(self, *arguments: str | Path) -> str:
        settings = self.folder / "storage.conf"
        done = subprocess.run(
            ["buildah", *arguments], env={**os.environ, "CONTAINERS_STORAGE_CONF": str(settings)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"buildah {' '.join(map(str, arguments))}\n{done.stdout[-3000:]}{done.stderr}"
        return done.stdout.strip()

    def build(self, dockerfile: Path, context: Path, arguments: Mapping[str, str] = {}) -> Image:
        """Run the Dockerfile's steps as root of this machine, with its network and no registry.

        `arguments`: values for the Dockerfile's ARGs.
        """
        name = dockerfile.name.partition(".")[0]
        self.run(
            "bud", "--quiet", "--format", "docker", "--isolation", "chroot", "--network", "host", "--pull-never",
            *(word for each in arguments.items() for word in ("--build-arg", "=".join(each))),
            "--file", dockerfile, "--tag", name, context,
        )  # fmt: skip
        container = self.run("from", "--pull-never", name)
        described = json.loads(self.run("inspect", "--type", "image", name))["Docker"]["config"]
        return Image(name, Path(self.run("mount", container)), described)


@contextmanager
def open_builder(folder: Path) -> Iterator[Builder]:
    """With the base in it; afterwards nothing of it is mounted or there. Skips the test without Buildah or root."""
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            needed(f"needs {program}; scripts/install_builder.sh --yes installs it")
    if os.geteuid() != 0:
        needed("builds images as root")
    driver = "overlay" if "overlay" in Path("/proc/filesystems").read_text() else "vfs"
    (folder / "storage.conf").write_text(STORAGE.format(driver=driver, folder=folder))
    builder = Builder(folder)
    system = folder / "base"
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", RELEASE, system], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    certificates = os.environ.get("PIP_CERT")
    if certificates:
        shutil.copy(certificates, system / "etc" / "pip-authorities.pem")
        (system / "etc" / "pip.conf").write_text("[global]\ncert = /etc/pip-authorities.pem\n")
    container = builder.run("from", "scratch")
    builder.run("add", "--quiet", container, f"{system}/", "/")
    builder.run("commit", "--quiet", container, BASE)
    builder.run("rm", container)
    shutil.rmtree(system)
    try:
        yield builder
    finally:
        builder.run("rm", "--all")
        builder.run("rmi", "--all", "--force")


def write_context(folder: Path) -> Path:
    """What the builder is given: the sources with what `make dist` builds."""
    if not (PAGE_FOLDER / "index.html").is_file():
        needed("needs the demo page; `make web` builds it")
    if not (DOCS_FOLDER / "index.html").is_file():
        needed("needs the documentation; `make docs` builds it")
    for name in ("constraints.txt", ".dockerignore"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "docker", folder / "docker")
    subprocess.run([sys.executable, ROOT / "scripts" / "release" / "wheels.py", folder / "dist"], check=True)
    return folder


@dataclass(frozen=True)
class Image:
    """An image, unpacked at `root`, and what its Dockerfile says of programs that are started in it."""

    name: str
    root: Path
    described: Mapping[str, Any]

    def container(
        self, *arguments: str, volumes: Mapping[str, Path] = {}, variables: Mapping[str, str] = {}
    ) -> list[str]:
        """The command that starts the image's program with these arguments, or its own where there are none.

        As `docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --network host` does: as
        the image's user, with nothing to write but /tmp and `volumes`, by their paths inside.
        """
        return self.command(*self.described["Entrypoint"], *(arguments or self.described["Cmd"]),
                            volumes=volumes, variables=variables)  # fmt: skip

    def command(self, *command: str, volumes: Mapping[str, Path] = {}, variables: Mapping[str, str] = {}) -> list[str]:
        """The same for another program than the image's."""
        mounts = []
        for inside, outside in volumes.items():
            place = self.root / inside.lstrip("/")
            # What `docker run -v` makes where the image has nothing of that name.
            if outside.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            elif not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            mounts.append(f"mount --bind {shlex.quote(str(outside))} {shlex.quote(str(place))}")
        user, _, group = self.described["User"].partition(":")
        pairs = [*self.described["Env"], *(f"{name}={value}" for name, value in variables.items())]
        script = START.format(
            volumes="\n".join(mounts), variables=shlex.join(pairs), user=user, group=group,
            folder=shlex.quote(self.described["WorkingDir"] or "/"),
        )  # fmt: skip
        return ["env", f"ROOT={self.root}", "unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh",
                *command]  # fmt: skip

    @property
    def user(self) -> tuple[int, int]:
        user, _, group = self.described["User"].partition(":")
        return int(user), int(group)


def volume(folder: Path, image: Image) -> Path:
    """As a new volume is: it takes over the owner of the image's folder."""
    folder.mkdir()
    os.chown(folder, *image.user)
    return folder
