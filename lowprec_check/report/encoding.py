"""Writes ``<=`` for ``≤`` on a stream that cannot encode it, such as a terminal under an ASCII locale."""

from __future__ import annotations

import codecs
import re
import unicodedata

TRANSLITERATE = "lowprec_check.transliterate"
"""The name of the error handler, for ``stream.reconfigure(errors=TRANSLITERATE)``."""

_WRITTEN = """
·- –- —- −- ‐- ‑- ⁻- ×x →-> ←<- …... ≤<= ≥>= ≠!= ≈~ ±+- ∞inf ‖|| µu Δd
‘' ’' ‚' “" ”" „" «" »" •* ─- ━- ╸- ╺- │| ┃|
✅[ok] ➖[-] ❌[x] ⚠[!] ❔[?] ⏭[>] 🔴[x] 🟡[!] 🔵[i] 🟢[+] ⚪[=] ✓+ ✕x ✗x ▲! \ufe0f
"""
"""Each character of our texts, and of what other programs put into messages, followed by what is written for it."""

_ASCII = {pair[0]: pair[1:] for pair in _WRITTEN.split()}

_SPINNER = "\u2800", "\u28ff"
"""The Braille patterns, which Rich animates while a scan runs."""


def _handle(error: UnicodeError) -> tuple[str, int]:
    """Replace what cannot be encoded; what is wider then takes the difference from the next gap between columns."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    written = transliterated(lost)
    excess = len(written) - sum(map(_width, lost))
    gap = _NEXT_GAP.match(error.object, error.end)
    if gap is None or excess <= 0:
        return written, error.end
    return written + gap["cell"] + gap["spaces"][:-excess].ljust(1), gap.end()


_NEXT_GAP = re.compile(r"(?P<cell>[!-~]*(?: [!-~]+)*)(?P<spaces> {2,})")
"""The ASCII text up to the next two or more spaces, as between the columns of a table."""


def transliterated(text: str) -> str:
    """``text`` in ASCII; characters without a form in it as backslash escapes."""
    return "".join(character if character.isascii() else _replacement(character) for character in text)


def _replacement(character: str) -> str:
    if _SPINNER[0] <= character <= _SPINNER[1]:
        return "*"
    known = _ASCII.get(character)
    if known is None and (digit := unicodedata.digit(character, None)) is not None:  # superscript or subscript
        return str(digit)
    return character.encode("ascii", "backslashreplace").decode() if known is None else known


def _width(character: str) -> int:
    """Columns on a terminal."""
    if unicodedata.combining(character) or character == "\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


codecs.register_error(TRANSLITERATE, _handle)
