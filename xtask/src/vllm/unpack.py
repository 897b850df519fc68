"""Takes out of a release what running and reading its Python needs: its modules and its metadata.

`cargo xtask` runs this; the arguments are the folder with the one archive, a source distribution or a wheel,
and where its content belongs.
"""

import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def files(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The files of an archive, by their paths below its root."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    with wheel.open(name) as content:
                        yield name, content
        return
    with tarfile.open(path) as archive:
        for member in archive:
            root, _, name = member.name.partition("/")
            if not member.isfile():
                continue
            content = archive.extractfile(member)
            assert content is not None
            with content:
                yield f"{root}.dist-info/METADATA" if name == "PKG-INFO" else name, content


def main(folder: str, into: str) -> None:
    [path] = Path(folder).iterdir()
    package = path.name.partition("-")[0]
    for name, content in files(path):
        first, *rest = name.split("/")
        is_module = first == package and name.endswith(".py")
        is_metadata = first.endswith(".dist-info") and rest == ["METADATA"]
        if (is_module or is_metadata) and ".." not in rest:
            target = Path(into, first, *rest)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
