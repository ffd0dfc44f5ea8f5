"""Compiled kernels on disk, shared by all processes of a user.

A file is a digest of what follows, a line of JSON with the resources, and the code. It is written beside its place and
moved there, so that a reader never sees half a file and two writers can't disturb each other. A cache that can't be
written is no error, and a damaged file counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def directory() -> Path:
    """``CUATTN_CACHE_DIR``, or ``cuattn`` in the user's cache folder."""
    if chosen := os.environ.get("CUATTN_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return Path(base or Path("~/.cache").expanduser()) / "cuattn"


def load(key: str) -> tuple[dict[str, Any], bytes] | None:
    """The resources and the code stored under `key`, or None."""
    try:
        digest, resources, code = (directory() / key).read_bytes().split(b"\n", 2)
        if digest.decode() == _digest(resources, code):
            return json.loads(resources), code
    except (OSError, RuntimeError, ValueError):  # RuntimeError: the user has no home
        pass
    return None


def store(key: str, resources: dict[str, Any], code: bytes) -> None:
    """Keep `code` under `key` if the folder can be written."""
    text = json.dumps(resources).encode()
    temporary = None
    try:
        directory().mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory(), prefix=".new-")
        with os.fdopen(handle, "wb") as file:
            file.write(b"\n".join((_digest(text, code).encode(), text, code)))
        os.replace(temporary, directory() / key)
    except (OSError, RuntimeError):
        if temporary is not None:
            try:
                os.unlink(temporary)
            except OSError:
                pass


def _digest(resources: bytes, code: bytes) -> str:
    return hashlib.sha256(resources + b"\n" + code).hexdigest()
