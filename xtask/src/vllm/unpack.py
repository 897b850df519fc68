"""Takes out of a source distribution what running and reading its Python needs: its modules and its metadata.

`cargo xtask` runs this; the arguments are the folder with the one archive, and where its content belongs.
"""

import shutil
import sys
import tarfile
from pathlib import Path


def main(folder: str, into: str) -> None:
    [path] = Path(folder).glob("*.tar.gz")
    with tarfile.open(path) as archive:
        for member in archive:
            name, package, *rest = member.name.split("/") if member.isfile() else ("", "", "")
            target = Path(into, package, *rest)
            if package == "PKG-INFO":
                target = Path(into, f"{name}.dist-info", "METADATA")
            elif package != name.partition("-")[0] or target.suffix != ".py" or ".." in rest:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None
            with content, target.open("wb") as file:
                shutil.copyfileobj(content, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
