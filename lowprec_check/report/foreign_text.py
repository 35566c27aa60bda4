"""Text of others made safe to print: on one line, without invisible characters and folders of this machine, in the encoding of the stream."""

from __future__ import annotations

import codecs
import os
import re
import sys
import unicodedata

# -- On one line of any format

_SUSPECT = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff\ud800-\udfff]")
"""Control characters, line separators, direction marks and overrides, zero-width characters, non-characters."""

LONGEST = 300


def visible(text: str, most: int = LONGEST) -> str:
    r"""``text`` on one line of at most ``most`` characters, with invisible characters escaped: ``a\n``, ``\u202e``."""
    if len(text) > most:
        text = f"{text[: most - 1]}…"
    return _SUSPECT.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": " "}[character]
    if character == "\u200d" or unicodedata.category(character) == "Mn":  # joins emoji, does not change the direction
        return character
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"


def visible_lines(text: str, most: int = LONGEST) -> list[str]:
    """The lines of a code block, each passed through :func:`visible`, with their indentation."""
    return [visible(line.expandtabs(4), most) for line in text.splitlines()]


def visible_text(text: str) -> str:
    """The lines of a message, each passed through :func:`visible` in full."""
    return "\n".join(visible_lines(text, most=sys.maxsize))


def workflow_command(command: str, message: str, **properties: str) -> str:
    """A line that GitHub Actions shows at the code: ``::error file=net.py,line=23::message``, escaped as its own toolkit does."""

    def encoded(text: str, more: str = "") -> str:
        for character in f"%\r\n{more}":
            text = text.replace(character, f"%{ord(character):02X}")
        return text

    shown = ",".join(f"{name}={encoded(value, ':,')}" for name, value in properties.items())
    return f"::{command} {shown}::{encoded(message)}"


# -- Without folders of this machine: in a comment, a log, an upload

_PART = r"[^\s/\\'\"`:;,()\[\]{}<>|*?]+"
_PATH = rf"(?<![\w/\\.~@-])(?:file://)?(?:[A-Za-z]:[/\\]|/)(?!(?:dev|proc|sys)/|/)(?:{_PART}[/\\])+(?:{_PART})?"
_QUOTED = r"(?<=(['\"`]))(?:[A-Za-z]:[/\\]|/)(?:[^'\"`\n/\\]+[/\\])+[^'\"`\n/\\]*(?=\1)"
_ABSOLUTE = re.compile(f"{_QUOTED}|{_PATH}")
"""Paths of at least two parts, with spaces only within quotes; not URLs, and not `/dev/shm`, which is the same everywhere."""

_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\](?=.)|.*[/\\]lib[/\\]python3\.\d+[/\\](?=.)")


def without_folders(text: str) -> str:
    """``text`` with each absolute path replaced by what means the same elsewhere.

    That is the path from an installed package on (``timm/layers/mlp.py:42``), relative to the current folder, or else the name alone.
    """
    return _ABSOLUTE.sub(_without_folder, text) if "/" in text or "\\" in text else text


def _without_folder(match: re.Match[str]) -> str:
    path = match[0].removeprefix("file://")
    installed = _PACKAGES.match(path)
    if installed is not None:
        return path[installed.end() :].replace("\\", "/")
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # it was removed
        here = os.sep
    if len(here) > 1 and path.startswith(here) and path != here:
        return path[len(here) :]
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


# -- On a stream that cannot encode it, such as a terminal under an ASCII locale: ``<=`` for ``≤``

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

_NEXT_GAP = re.compile(r"(?P<cell>[!-~]*(?: [!-~]+)*)(?P<spaces> {2,})")
"""The ASCII text up to the next two or more spaces, as between the columns of a table."""


def transliterated(text: str) -> str:
    """``text`` in ASCII; characters without a form in it as backslash escapes."""
    return "".join(character if character.isascii() else _replacement(character) for character in text)


def _replacement(character: str) -> str:
    if _SPINNER[0] <= character <= _SPINNER[1]:
        return "*"
    if character in _ASCII:
        return _ASCII[character]
    digit = unicodedata.digit(character, None)  # superscript or subscript
    return character.encode("ascii", "backslashreplace").decode() if digit is None else str(digit)


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


def _width(character: str) -> int:
    """Columns on a terminal."""
    if unicodedata.combining(character) or character == "\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


codecs.register_error(TRANSLITERATE, _handle)
