"""Makes foreign text safe to print: one line, visible, encodable, without local folders."""

from __future__ import annotations

import codecs
import os
import re
import sys
import unicodedata

# -- On one line of any format

# written with escapes, since none of these characters can be seen in an editor
_EMOJI = "\u2190-\u2bff\U0001f000-\U0001faff"
_BLANK = (
    "\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Directions, joiners, tags, ignorable characters, fillers, line separators, non-characters."""
_SUSPECT = re.compile(
    rf"(?!(?<=[{_EMOJI}\ufe0f])\u200d[{_EMOJI}]|(?<=[#*0-9\xa9\xae\u203c-\u2139{_EMOJI}])\ufe0f)"
    rf"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ue000-\uf8ff\U000f0000-\U0010ffff{_BLANK}]"
)
"""These, controls, surrogates and private use; not what joins two emoji or makes one."""

LONGEST = 300


def visible(text: str, most: int = LONGEST) -> str:
    r"""``text`` on one line, at most ``most`` long, invisible characters as ``\\u202e``."""
    if len(text) > most:
        text = f"{text[: most - 1]}…"
    return _SUSPECT.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    number, short = ord(match[0]), {"\n": "\\n", "\r": "\\r", "\t": " "}
    if match[0] in short:
        return short[match[0]]
    if number < 256:
        return f"\\x{number:02x}"
    if number < 0x10000:
        return f"\\u{number:04x}"
    return f"\\U{number:08x}"


LONGEST_LINE = 2000
"""Of a code block: only names that are meant to break a report make longer lines."""


def visible_lines(text: str, most: int = LONGEST_LINE) -> list[str]:
    """The lines of a code block, each passed through :func:`visible`, with their indentation."""
    return [visible(line.expandtabs(4), most) for line in text.splitlines()]


def visible_text(text: str) -> str:
    """The lines of a message, each passed through :func:`visible` in full."""
    return "\n".join(visible_lines(text, most=sys.maxsize))


def workflow_command(command: str, message: str, **properties: str) -> str:
    """GitHub's ``::error file=net.py,line=23::message``, escaped as in its own toolkit."""

    def encoded(text: str, more: str = "") -> str:
        for character in f"%\r\n{more}":
            text = text.replace(character, f"%{ord(character):02X}")
        return text

    pairs = ",".join(f"{name}={encoded(value, ':,')}" for name, value in properties.items())
    return f"::{command} {pairs}::{encoded(message)}"


# -- Without folders of this machine: in a comment, a log, an upload

_PART = r"[^\s/\\'\"`:;,()\[\]{}<>|*?]+"
_PATH = rf"(?<![\w/\\.~@-])(?:file://)?(?:[A-Za-z]:[/\\]|/)(?!(?:dev|proc|sys)/|/)(?:{_PART}[/\\])+(?:{_PART})?"
_QUOTED = r"(?<=(['\"`]))(?:[A-Za-z]:[/\\]|/)(?:[^'\"`\n/\\]+[/\\])+[^'\"`\n/\\]*(?=\1)"
_ABSOLUTE = re.compile(f"{_QUOTED}|{_PATH}")
"""Paths of two or more parts, with spaces only in quotes; no URLs, no `/dev`, `/proc`, `/sys`."""

_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\](?=.)|.*[/\\]lib[/\\]python3\.\d+[/\\](?=.)")


def without_folders(text: str) -> str:
    """``text`` with each absolute path replaced by what means the same elsewhere.

    That is the path from an installed package on (``timm/layers/mlp.py:42``), relative to the
    current folder, or else the name alone.
    """
    if "/" in text or "\\" in text:
        return _ABSOLUTE.sub(_without_folder, text)
    return text


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
    # any other folder is the user's business: the name alone
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


# -- On a stream that cannot encode it, such as a terminal under an ASCII locale: ``<=`` for ``≤``

TRANSLITERATE = "lowprec_check.transliterate"
"""The name of the error handler, for ``stream.reconfigure(errors=TRANSLITERATE)``."""

_WRITTEN = """
·- –- —- −- ‐- ‑- ⁻- ×x →-> ←<- …... ≤<= ≥>= ≠!= ≈~ ±+- ∞inf ‖|| µu Δd
‘' ’' ‚' “" ”" „" «" »" •* ─- ━- ╸- ╺- │| ┃|
✅[ok] ➖[-] ❌[x] ⚠[!] ❔[?] ⏭[>] 🔴[x] 🟡[!] 🔵[i] 🟢[+] ⚪[=] ✓+ ✕x ✗x ▲! \ufe0f
"""
"""A character of our texts or other programs' messages, followed by its ASCII form."""

_ASCII = {pair[0]: pair[1:] for pair in _WRITTEN.split()}

_SPINNER = "\u2800", "\u28ff"
"""The Braille patterns, which Rich animates while a scan runs."""

_NEXT_GAP = re.compile(r"(?P<cell>[\x1b!-~]*(?: [\x1b!-~]+)*)(?P<spaces> {2,})")
"""The ASCII text, maybe with colours, up to two or more spaces, as between columns of a table."""


def transliterated(text: str) -> str:
    """``text`` in ASCII; characters without a form in it as backslash escapes."""
    parts = []
    for character in text:
        part = _ASCII.get(character, character)
        if _SPINNER[0] <= character <= _SPINNER[1]:
            part = "*"
        elif not part.isascii() and unicodedata.digit(character, None) is not None:  # superscript or subscript
            part = str(unicodedata.digit(character))
        parts.append(part.encode("ascii", "backslashreplace").decode())
    return "".join(parts)


def _handle(error: UnicodeError) -> tuple[str, int]:
    """Replace what cannot be encoded; extra width comes out of the next gap between columns."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    written = transliterated(lost)
    # columns stay aligned: what is wider takes spaces from the next gap, of which one is left
    excess = len(written)
    for character in lost:
        if not unicodedata.combining(character) and character != "\ufe0f":
            excess -= 1 + (unicodedata.east_asian_width(character) in "WF")
    gap = _NEXT_GAP.match(error.object, error.end)
    if gap is None or excess <= 0:
        return written, error.end
    return written + gap["cell"] + gap["spaces"][:-excess].ljust(1), gap.end()


codecs.register_error(TRANSLITERATE, _handle)
