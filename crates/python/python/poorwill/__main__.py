"""`python -m poorwill`: the `poorwill` command of this installation, in this process's place."""

import os
import sys
import sysconfig
from pathlib import Path


def places() -> list[Path]:
    """Where an installation puts its programs: beside its packages, above them, or where Python says."""
    packages = Path(__file__).parents[1]
    # Of `--target`; of an environment, `--user` and `--prefix`; and of an editable installation.
    folders = [packages / "bin", *(above / "bin" for above in packages.parents[2:3])]
    return [folder / "poorwill" for folder in (*folders, Path(sysconfig.get_path("scripts")))]


def main() -> None:
    command = next((path for path in places() if os.access(path, os.X_OK)), None)
    if command is None:
        looked = ", ".join(str(path) for path in places())
        sys.exit(
            f"python -m poorwill: there is no program at {looked}; `maturin` alone leaves it out, and pip "
            "builds it: install again, from the sources with `pip install ./crates/python`"
        )
    os.execv(command, [str(command), *sys.argv[1:]])


if __name__ == "__main__":
    main()
