"""Canonical JSON and digests: equal documents have equal text, on every machine and in every process."""

from __future__ import annotations

import hashlib
import json

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def canonical_json(document: object) -> str:
    """Return the one JSON text of a document: sorted keys, no blanks, no NaN."""
    return _ENCODER.encode(document)


def digest(document: object) -> str:
    """Return the sha256, in hexadecimal, of a document's canonical JSON."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()
