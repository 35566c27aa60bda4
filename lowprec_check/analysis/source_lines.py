"""The text of lines of the user's source by their names, as reports show them."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from pathlib import Path

from lowprec_check.errors import encodable


def texts_of_lines(sources: Iterable[str | None], target: str) -> dict[str, str]:
    """The text of each line ``model.py:41``, without its indentation; those of files that are not
    found are left out.

    A file outside the current folder is shown by its name alone: it is looked for beside
    ``target``, the user's name for it. At most 2,000 lines, of 200 characters each.
    """
    texts: dict[str, str] = {}
    folder = Path(target.partition(":")[0]).parent
    for source in dict.fromkeys(sources):
        file, _, line = (source or "").rpartition(":")
        if not file or not line.isdecimal() or len(texts) == 2000:
            continue
        # linecache also finds `package/file.py` on the import path.
        text = linecache.getline(file, int(line)) or linecache.getline(str(folder / file), int(line))
        if source and text.strip():
            texts[source] = encodable(text.strip()[:200])
    return texts
