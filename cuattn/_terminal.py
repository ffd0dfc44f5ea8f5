"""What the subcommands share that run a model: which arrays, messages, and bars for work that takes a while."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cuattn._gguf import ModelError


def array_module(backend: str) -> Any:
    """NumPy or CuPy.

    Parameters
    ----------
    backend : str
        numpy, cupy, or auto: cupy if it is there and has a device.

    Returns
    -------
    module

    Raises
    ------
    ModelError
        If CuPy is wanted and missing, or has no device.
    """
    if backend == "numpy":
        return np
    try:
        import cupy
    except ImportError:
        if backend == "auto":
            return np
        raise ModelError("CuPy is not installed: pip install 'cuattn[cuda13x]'") from None
    if cupy.cuda.is_available():
        return cupy
    if backend == "auto":
        return np
    raise ModelError("there is no CUDA device: use --backend numpy")


@contextlib.contextmanager
def progress(what: str, total: int, least: int) -> Iterator[Callable[[float], None]]:
    """A bar on standard error, if that is a terminal, the work is long, and the package rich is there.

    Parameters
    ----------
    what : str
        What is being done.
    total : int
        How much of it there is.
    least : int
        Less than this needs no bar.

    Yields
    ------
    function of float
        Says how much is done.
    """
    if total < least or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
