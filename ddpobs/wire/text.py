"""Grammar of the identifiers in a batch's key, and printable forms of text from a client."""

from __future__ import annotations

import re
from collections.abc import Sequence

RUN_ID = "[A-Za-z0-9._-]{1,128}"
"""Regular expression of a run id's characters and length; it also matches `.` and `..`."""
STRICT_RUN_ID = rf"^(?!\.{{1,2}}\Z){RUN_ID}\Z"
"""Whole regular expression of a run id.

Clients and browsers remove `.` and `..` from a path. `\\Z`, because `$` also matches before a final line feed.
"""
NONCE = "[0-9a-f]{16}"
"""Regular expression of an attempt's or a source's id."""

MAX_TAGS, TAG_CHARACTERS, NOTE_CHARACTERS = 16, 64, 2000
"""Maximum number of tags of a run, of characters of a tag, and of characters of a note."""

_TOKEN = re.compile(r"[\x21-\x7e]+")


def clean_token(text: str) -> str:
    """A token without white space at its ends, as both sides use it.

    Raises:
        ValueError: A header cannot carry the rest; the message does not contain it.
    """
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError("the token must have ASCII letters, digits and signs, without spaces inside")
    return token


def clean_tags(texts: Sequence[str]) -> tuple[str, ...]:
    """Tags without white space at their ends, without empty and repeated ones, in order.

    Raises:
        ValueError: There are too many, or one is too long, has a comma, or has a sign that is not printable.
    """
    tags = tuple(dict.fromkeys(filter(None, (text.strip() for text in texts))))
    if len(tags) > MAX_TAGS or not all(_is_tag(tag) for tag in tags):
        limits = f"at most {MAX_TAGS} tags of at most {TAG_CHARACTERS} printable characters"
        raise ValueError(f"expected {limits}, without commas")
    return tags


def _is_tag(text: str) -> bool:
    return len(text) <= TAG_CHARACTERS and "," not in text and text.isprintable()


def printable(text: str) -> str:
    """Escape every character that a terminal could obey or that could end a line, such as a parameter's odd name."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def joined(names: Sequence[str], most: int = 50, characters: int = 1000) -> str:
    """The first names with commas between them, within a limit of names and of characters."""
    text = ", ".join(names[:most])
    return text if len(text) <= characters else text[:characters].rpartition(", ")[0] or text[:characters]
