"""The C++ kernels of a graph are compiled together: what they include costs more than what they compute.

Inductor calls the compiler for each. Here what it asks for until it waits for the first of them is one text
for each core, each kernel in a namespace of its own. Of the library that comes of it every kernel has a
copy, which differs in the bytes that say which of them it is. What cannot be compiled so is compiled apart.
"""

import contextlib
import functools
import logging
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("stepgraph")

# Sees to it that files are there: given them, and what compiles some of them.
Provide = Callable[[Sequence[Path], Callable[[Sequence[Path]], None]], None]

# Included before any namespace begins; what kernels include besides, inductor's header has already.
_INCLUDED = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cerrno>
#include <cstdlib>
#include <sstream>
"""
_KERNEL = """
#define kernel kernel_{number}
#define PyInit_kernel PyInit_kernel_{number}
namespace stepgraph_{number} {{
#include "{source}"
}}
#undef kernel
#undef PyInit_kernel
"""
_MOST = 8  # kernels of one text: each has a library with the code of all of them
_MARK = b"stepgraph: this is kernel "
_LAST = """
__attribute__((used)) static volatile const char which[] = "{mark}0000";

PyMODINIT_FUNC PyInit_kernel(void) {{
    switch (std::atoi(const_cast<const char*>(which) + {length})) {{
{cases}
    }}
    return nullptr;
}}
"""


class _Wanted:
    """A library that inductor has asked for: by which command it is compiled, from which text.

    ``joins``: it may be compiled with others.
    """

    def __init__(self, builder: Any, apart: Callable[[], None]) -> None:
        self.file = Path(builder.get_target_file_path())
        self.source = self.file.with_suffix(".cpp")
        self.apart = apart
        place = {str(self.source): "SOURCE", str(self.file): "LIBRARY"}
        # Inductor quotes nothing: of a folder with a blank in its name neither is found.
        words = shlex.split(builder.get_command_line())
        self.command = tuple(place.get(word, word) for word in words)
        self.joins = {"SOURCE", "LIBRARY"} <= {*self.command} and self.source.exists()


def _compile_together(wanted: Sequence[_Wanted]) -> None:
    """Libraries of one command.

    Raises:
        OSError, subprocess.CalledProcessError: they cannot be compiled so; none is there.
    """
    numbers = range(len(wanted))
    kernels = [_KERNEL.format(number=n, source=one.source) for n, one in enumerate(wanted)]
    cases = "\n".join(
        f"        case {n}: return stepgraph_{n}::PyInit_kernel_{n}();" for n in numbers
    )
    last = _LAST.format(mark=_MARK.decode(), length=len(_MARK), cases=cases)
    text = "".join((_INCLUDED, *kernels, last))
    source, library = (wanted[0].file.with_suffix(s) for s in (".together.cpp", ".together"))
    try:
        source.write_text(text)
        place = {"SOURCE": str(source), "LIBRARY": str(library)}
        command = [place.get(word, word) for word in wanted[0].command]
        subprocess.run(command, check=True, capture_output=True, cwd=source.parent)
        code = library.read_bytes()
        for number, one in zip(numbers, wanted, strict=True):
            part = one.file.with_name(f"{one.file.name}.{os.getpid()}.part")
            part.write_bytes(code.replace(_MARK + b"0000", _MARK + b"%04d" % number))
            part.replace(one.file)
    finally:
        for path in (source, library):
            path.unlink(missing_ok=True)


def _compile(wanted: Sequence[_Wanted]) -> None:
    """Libraries; what cannot be compiled is missing afterwards."""
    if len(wanted) > 1:
        try:
            return _compile_together(wanted)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"").decode(errors="replace")
            log.debug("kernels are compiled apart, together they cannot be: %s %s", error, said)
    for one in wanted:
        with contextlib.suppress(Exception):  # inductor asks for it again, and says what is wrong
            one.apart()


class _Batch:
    """What inductor has asked for since it last waited."""

    def __init__(self, provide: Provide, submit: Callable[[Callable[[], None]], Any]) -> None:
        self.provide, self.submit = provide, submit
        self.waiting: list[_Wanted] = []

    def add(self, wanted: _Wanted) -> "_Batch":
        """Returns a future, as far as inductor asks one."""
        self.waiting.append(wanted)
        return self

    def result(self, timeout: float | None = None) -> None:
        """Compiles all that waits."""
        waiting, self.waiting = self.waiting, []
        groups = [[one] for one in waiting if not one.joins]
        by_command: dict[tuple[str, ...], list[_Wanted]] = {}
        for one in waiting:
            if one.joins:
                by_command.setdefault(one.command, []).append(one)
        for same in by_command.values():
            groups += _shared_out(same)
        for begun in [self.submit(functools.partial(self._provide, group)) for group in groups]:
            begun.result()

    def _provide(self, group: Sequence[_Wanted]) -> None:
        by_file = {one.file: one for one in group}
        self.provide([*by_file], lambda files: _compile([by_file[file] for file in files]))


def _shared_out(wanted: Sequence[_Wanted]) -> list[list[_Wanted]]:
    """Libraries in parts of about equal length of text, one for each core or more."""
    parts = min(len(wanted), max(_cores(), math.ceil(len(wanted) / _MOST)))
    found: list[list[_Wanted]] = [[] for _ in range(parts)]
    lengths = [0] * len(found)
    sizes = {one.file: one.source.stat().st_size for one in wanted}
    for one in sorted(wanted, key=lambda one: -sizes[one.file]):
        least = lengths.index(min(lengths))
        found[least].append(one)
        lengths[least] += sizes[one.file]
    return found


def _cores() -> int:
    """How many this process may compile on: the ranks of a machine share them."""
    from torch._inductor.async_compile import get_compile_threads

    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(1, int(given)) if given.isdecimal() else 1
    return max(1, get_compile_threads() // ranks)


@contextlib.contextmanager
def libraries_from(provide: Provide) -> Iterator[None]:
    """Within it, inductor asks for the libraries that it compiles for the host.

    Args:
        provide: called by several threads.
    """
    from torch._inductor import codecache
    from torch._inductor.async_compile import AsyncCompile

    compiled, submit = codecache._worker_compile_cpp, AsyncCompile.__dict__["submit"]

    def worker(lock: str, builders: Sequence[Any], *more: Any) -> None:
        for builder in builders:
            make = functools.partial(compiled, lock, (builder,), *more)
            file = Path(builder.get_target_file_path())
            if file.suffix == ".so":
                provide([file], lambda _, make=make: make())
            else:
                make()

    batch = _Batch(provide, AsyncCompile.submit)

    def later(cls: type, task: Any) -> Any:
        kernel = getattr(task, "func", None) is worker and len(task.args[1]) == 1
        if not kernel or sys.platform != "linux":
            return submit.__get__(None, cls)(task)
        lock, (builder,), *more = task.args
        return batch.add(_Wanted(builder, functools.partial(compiled, lock, (builder,), *more)))

    codecache._worker_compile_cpp = worker
    AsyncCompile.submit = classmethod(later)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        codecache._worker_compile_cpp = compiled
        AsyncCompile.submit = submit
