"""Reasoning that a client must not see but gives back, so that the next prompt can contain it. Pure.

Both Anthropic's signatures and OpenAI's encrypted content are such texts, opaque to clients. Nothing is secret here, as
it is the client's own model: the text is only packed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

from gyre.proxy.dialects.intake import Intake

_MARK = "gyre1."
MAX_CHARACTERS = 4 << 20


def seal(text: str) -> str:
    """The text, packed."""
    return _MARK + base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8", "replace"))).decode()


def unseal(sealed: str, intake: Intake) -> str:
    """What was packed, charged to `intake`; empty where it is nothing of ours, or far too long."""
    if not sealed.startswith(_MARK):
        return ""
    try:
        packed = base64.b64decode(sealed[len(_MARK) :].encode(), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, MAX_CHARACTERS)
        if unpacker.unconsumed_tail or not unpacker.eof:
            return ""
        found = text.decode()
    except (binascii.Error, zlib.error, ValueError):
        return ""
    intake.charge(found)
    return found


def signature(text: str) -> str:
    """What a block of visible reasoning is signed with."""
    return "gyre0." + hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=24).hexdigest()
