"""What inductor finds on a machine: a compiler, vector instructions, and what was compiled before."""

import contextlib
import os
import platform
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as _inductor_config

from stepgraph import torch_internals


def cpp_compiler() -> str:
    """The C++ compiler that inductor calls.

    Raises:
        Exception: torch's own; it found none that works.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def cache_directory() -> str:
    """Where inductor keeps what it compiled; made if it is not there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def chosen_cache_directory() -> str | None:
    """Where the user wants inductor to keep what it compiled; None: they did not say.

    (Inductor says where it does in the same variable.)
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return None if given is None or os.path.abspath(given) == default_cache_dir() else given


@contextlib.contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Within it, a folder is all that inductor finds of what was compiled, and where it keeps it."""
    from torch._inductor.utils import clear_caches

    # Inductor sets the second one itself, if nobody has, and for good: to the first folder of several.
    folders = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder / "triton"}
    before = {name: os.environ.get(name) for name in folders}
    clear_caches()  # what it has in memory it would not write
    os.environ.update({name: str(path) for name, path in folders.items()})
    try:
        yield
    finally:
        clear_caches()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def without_headers() -> Iterator[None]:
    """Within it nothing is expected to be compiled, and no header is prepared for it.

    Inductor looks whether the precompiled one is still right before it looks for a compiled kernel: the C++
    preprocessor runs in every process, for half a second. What is compiled nevertheless does without one.
    """
    from torch._inductor import codecache

    by_inductor = getattr(codecache, "_precompile_header", None)
    if by_inductor is None:  # a torch that does it otherwise
        yield
        return
    codecache._precompile_header = lambda *_, **__: ""  # type: ignore[assignment]
    try:
        yield
    finally:
        codecache._precompile_header = by_inductor


@contextlib.contextmanager
def _remembering_what_loads() -> Iterator[None]:
    """A trial program that this system has loaded is not loaded again.

    Each costs a process that loads torch's libraries, a quarter of a second.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    probe = getattr(VecISA, "_probe_load", None)
    if probe is None:  # a torch that asks otherwise
        yield
        return

    def loads(self: Any, library: str) -> bool:
        loaded = Path(f"{library}.{platform.platform()}")
        if loaded.exists():
            return True
        found = probe(self, library)
        with contextlib.suppress(OSError):  # a full disk: it is asked again
            if found:
                loaded.touch()
        return found

    VecISA._probe_load = loads  # type: ignore[method-assign]
    try:
        yield
    finally:
        VecISA._probe_load = probe  # type: ignore[method-assign]


_LIGHT = """
#include <immintrin.h>

extern "C" void stepgraph_trial(float* given) {
#ifdef __AVX512F__
    _mm512_storeu_ps(given, _mm512_add_ps(_mm512_loadu_ps(given), _mm512_set1_ps(1)));
#else
    _mm256_storeu_ps(given, _mm256_add_ps(_mm256_loadu_ps(given), _mm256_set1_ps(1)));
#endif
}
"""


@contextlib.contextmanager
def _light_trials() -> Iterator[None]:
    """Of instructions that torch itself computes with here, only that the compiler has them is tried.

    Inductor's trial asks besides whether torch's own headers and libraries do, and takes three seconds for
    reading these headers.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    heavy, tried = getattr(VecISA, "_avx_code", None), VecISA.check_build
    computes_with = {"AVX2": (256,), "AVX512": (256, 512)}.get(
        torch.backends.cpu.get_cpu_capability(), ()
    )

    def check_build(self: Any, code: str) -> bool:
        light = code == heavy and self.bit_width() in computes_with
        return tried(self, _LIGHT if light else code)

    VecISA.check_build = check_build  # type: ignore[method-assign]
    try:
        yield
    finally:
        VecISA.check_build = tried  # type: ignore[method-assign]


def _offered_instructions() -> list[Any]:
    """The vector instructions that an x86 machine offers and inductor knows, which it tries; best first."""
    from torch._inductor import cpu_vec_isa

    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    offered = cpu_vec_isa.x86_isa_checker()
    known = cpu_vec_isa.supported_vec_isa_list
    return [isa for isa in known if all(flag in offered for flag in str(isa).split())]


def look_at_machine() -> None:
    """Finds out which vector instructions this machine and its compiler have; once a process.

    Trial programs are compiled for that, seconds in all, several at a time, and kept where inductor keeps
    its code.
    """
    from torch._inductor import cpu_vec_isa

    if possible := _offered_instructions():
        with (
            _remembering_what_loads(),
            _light_trials(),
            ThreadPoolExecutor(len(possible) + 1) as trials,
        ):
            [*trials.map(bool, possible)]
    cpu_vec_isa.pick_vec_isa()


def precompile_headers() -> threading.Thread | None:
    """Begins to compile the header that all C++ kernels include, where this machine has none yet.

    Inductor would begin when it has its first kernel, and take half as long for it as for all kernels of a
    small model; here it happens while the step's code is captured. Whatever goes wrong, inductor will say.

    Returns:
        what is at it; None: there is nothing to do.
    """
    from torch._inductor import codecache, cpp_builder

    with contextlib.suppress(AttributeError):  # a torch that does it otherwise
        there = any(Path(codecache._HEADER_DIR).glob("*.gch"))
        chosen = _inductor_config.cpp.simdlen is not None  # other instructions than the best
        if there or chosen or not _inductor_config.cpp_cache_precompile_headers:
            return None
        if not (likely := _offered_instructions()):
            return None
        kernels = codecache.CppPythonBindingsCodeCache
        host = torch_internals.host_device().type
        options: dict[str, Any] = {**kernels.cpp_compile_command_flags, "device_type": host}
        options |= {"extra_flags": (), "use_relative_path": False, "vec_isa": likely[0]}
        build = cpp_builder.CppTorchDeviceOptions(compile_only=False, min_optimize=False, **options)
        command = cpp_builder.CppBuilder(name="o", sources="i", BuildOption=build)
        header = kernels._get_uncompiled_header(host)

        def compile_it() -> None:
            with contextlib.suppress(Exception):
                codecache._precompile_header(
                    header, command.get_command_line(), min_optimize=False, **options
                )

        thread = threading.Thread(target=compile_it, name="stepgraph: C++ header")
        thread.start()
        return thread
    return None


def settings() -> tuple:
    """All that inductor can be told, as a digest, and what else of a process it generates code for."""
    return (
        _inductor_config.get_hash().hex(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )


def caches() -> bool:
    """Whether inductor keeps what it compiles, for other processes too."""
    return bool(_inductor_config.fx_graph_cache) and not _inductor_config.force_disable_caches


def cuda_driver_version() -> str:
    """The newest CUDA that the driver runs: ``13.0``."""
    number = torch._C._cuda_getDriverVersion()
    return f"{number // 1000}.{number % 1000 // 10}"
