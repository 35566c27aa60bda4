"""Makes names and messages from users' code safe to print on one line of any format."""

from __future__ import annotations

import re
import sys
import unicodedata

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
    shown = ",".join(f"{name}={_percent_encoded(value, ':,')}" for name, value in properties.items())
    return f"::{command} {shown}::{_percent_encoded(message)}"


def _percent_encoded(text: str, more: str = "") -> str:
    """``text`` with percent signs, line ends and the characters ``more`` encoded."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text
