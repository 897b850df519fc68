"""The one answer: the metadata that lies beside the sources."""

import shutil
from email.parser import HeaderParser
from pathlib import Path


def prepare_metadata_for_build_wheel(folder: str, config_settings: object = None) -> str:
    """Puts the metadata where pip looks for it, and says in which folder."""
    stated = HeaderParser().parsestr(Path("PKG-INFO").read_text(encoding="utf-8"), headersonly=True)
    name = f"{stated['Name']}-{stated['Version']}.dist-info"
    Path(folder, name).mkdir()
    shutil.copy("PKG-INFO", Path(folder, name, "METADATA"))
    return name
