"""Takes out of a wheel what reading its sources needs: its Python and its metadata.

`cargo xtask vllm` runs this; the arguments are the folder with the one wheel, and where its content belongs.
"""

import sys
import zipfile
from pathlib import Path


def main(folder: str, into: str) -> None:
    [wheel] = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") or name.split("/")[0].endswith(".dist-info"):
                archive.extract(name, into)


if __name__ == "__main__":
    main(*sys.argv[1:])
