"""The npm packages that pictures and names come from: versions, licences, counts, and how to get them."""

import json
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One npm package; ``licence`` as its manifest must say, ``members`` the files under ``prefix``."""

    name: str
    version: str
    licence: str
    prefix: str
    members: int

    @property
    def archive(self) -> str:
        """File name that ``npm pack`` gives the package."""
        return f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"


GLOSSY = Package("@lobehub/fluent-emoji-3d", "1.1.0", "MIT", "package/assets/", 3391)
FLAT = Package("@lobehub/fluent-emoji-flat", "1.1.0", "MIT", "package/assets/", 3259)
CLASSIC = Package("@iconify-json/noto", "1.2.9", "Apache-2.0", "package/icons.json", 1)
NAMES = Package("emojibase-data", "17.0.0", "MIT", "package/en/", 20)


class SourceChanged(RuntimeError):
    """A package's licence or contents are not what this code was written for."""


def download(package: Package, folder: Path) -> Path:
    """Packs one package into ``folder`` with the npm client unless it is there already."""
    target = folder / package.archive
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return target


def check(package: Package, archive: Path) -> None:
    """Raises ``SourceChanged`` unless licence, version and member count are the expected ones."""
    manifest = json.loads(read(archive, "package/package.json"))
    with tarfile.open(archive) as tar:
        members = sum(name.startswith(package.prefix) for name in tar.getnames())
    found = (manifest["version"], manifest["license"], members)
    wanted = (package.version, package.licence, package.members)
    if found != wanted:
        raise SourceChanged(f"{package.name}: version, licence, files are {found}, expected {wanted}")


def read(archive: Path, member: str) -> bytes:
    """The bytes of one member of a package archive."""
    with tarfile.open(archive) as tar:
        stream = tar.extractfile(member)
        assert stream is not None, f"{member} is no file"
        return stream.read()


def assets(archive: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yields (code point key, bytes) of every picture file of an archive."""
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.name.startswith(prefix) else None
            if stream is not None:
                yield code_key(Path(member.name).stem), stream.read()


def code_key(code: str) -> str:
    """Code points in lower case without the presentation selector, e.g. ``1f34e`` or ``2764``."""
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")
