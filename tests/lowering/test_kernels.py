"""Kernels that several things have in common are compiled once, on all ranks of a machine."""

import multiprocessing
import os
import platform
import time

import pytest
import torch
from filelock import FileLock
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.lowering.cache import Cache
from stepgraph.lowering.inductor import _compiled
from stepgraph.lowering.kernels import IN_USE, Kernels
from stepgraph.torch_internals import compiler
from tests.support import HOST


@pytest.fixture
def kernels(tmp_path):
    return Kernels(tmp_path / "kernels")


def maker(content=b"code", made=None):
    def make(libraries):
        for library in libraries:
            library.write_bytes(content)
        if made is not None:
            made.extend(libraries)

    return make


def test_the_second_who_needs_it_gets_a_copy(kernels, tmp_path):
    made = []
    for number in range(3):
        library = tmp_path / str(number) / "k.main.so"
        library.parent.mkdir()
        kernels.provide([library], maker(made=made))
        kernels.provide([library], maker(made=made))  # there already
        assert library.read_bytes() == b"code"
    assert len(made) == 1


def flipped(path, outside):
    path.write_bytes(b"edoc")


def emptied(path, outside):
    path.write_bytes(b"")


def linked(path, outside):
    (outside / "other").write_bytes(b"code")
    path.unlink()
    path.symlink_to(outside / "other")


def a_folder(path, outside):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("poison", [flipped, emptied, linked, a_folder])
def test_what_was_damaged_is_made_again(poison, kernels, tmp_path):
    made = []
    first, second = tmp_path / "k.main.so", tmp_path / "again" / "k.main.so"
    second.parent.mkdir()
    kernels.provide([first], maker(made=made))
    (kept,) = (path for path in kernels.folder.iterdir() if path.suffix != ".lock")
    poison(kept, tmp_path)
    kernels.provide([second], maker(made=made))
    assert made == [first, second] and second.read_bytes() == b"code"


def test_what_others_are_at_is_left_until_the_rest_is_made(kernels, tmp_path):
    made = []
    libraries = [tmp_path / f"{name}.main.so" for name in "abc"]
    kernels.folder.mkdir()
    other = FileLock(kernels.folder / "b.main.so.lock")
    other.acquire()

    def make(missing):
        made.append([library.name[0] for library in missing])
        maker()(missing)
        other.release()

    kernels.provide(libraries, make)
    assert made == [["a", "c"], ["b"]] and all(library.exists() for library in libraries)


def test_what_could_not_be_made_is_missing(kernels, tmp_path):
    first, second = tmp_path / "a.main.so", tmp_path / "b.main.so"
    kernels.provide([first, second], lambda missing: maker()(missing[:1]))
    assert first.exists() and not second.exists()
    kernels.provide([first, second], maker())
    assert second.exists()


def test_a_failure_leaves_nothing(kernels, tmp_path):
    library = tmp_path / "k.main.so"

    def fail(libraries):
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        kernels.provide([library], fail)
    assert not library.exists()
    kernels.provide([library], maker())
    assert library.read_bytes() == b"code"


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path):
    (tmp_path / "kernels").write_text("in the way")
    library = tmp_path / "k.main.so"
    Kernels(tmp_path / "kernels").provide([library], maker())
    assert library.read_bytes() == b"code"


def test_old_ones_are_forgotten(kernels, tmp_path):
    for name in ("old.main.so", "new.main.so"):
        kernels.provide([tmp_path / name], maker())
    for path in kernels.folder.glob("old*"):
        os.utime(path, (time.time() - 2 * IN_USE,) * 2)
    kernels.forget()
    assert {path.name.split(".")[0] for path in kernels.folder.iterdir()} == {"new"}


def _slow(folder, number, made):
    own = folder / str(number) / "k.main.so"
    own.parent.mkdir()

    def make(libraries):
        time.sleep(0.3)
        own.write_bytes(b"code")
        made.put(number)

    Kernels(folder / "kernels").provide([own], make)
    assert own.read_bytes() == b"code"


def test_processes_that_want_the_same_wait_for_the_first(tmp_path):
    context = multiprocessing.get_context("fork")
    made = context.Queue()
    processes = [context.Process(target=_slow, args=(tmp_path, n, made)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert made.get(timeout=5) in range(3) and made.empty()


def test_another_graph_takes_the_kernels_that_it_has_in_common(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = []
    provide = Kernels.provide

    def counted(self, libraries, make):
        def counting(missing):
            compiled.extend(library.name for library in missing)
            make(missing)

        provide(self, libraries, counting)

    monkeypatch.setattr(Kernels, "provide", counted)
    worker = inductor_worker()
    x = torch.randn(32, 64)

    def layer(x):
        return (torch.cos(x),)

    def end(x):
        return (torch.tanh(torch.cos(x) @ x.T),)

    modules = [make_fx(function, tracing_mode="fake")(x) for function in (layer, end)]
    graphs = [(module, module.graph.find_nodes(op="placeholder")) for module in modules]
    first, second = _compiled(graphs, HOST)
    assert torch.allclose(first([x])[0], torch.cos(x))
    assert torch.allclose(second([x])[0], end(x)[0], atol=1e-5)
    assert len(compiled) == len({*compiled}) == 2
    entries = [path.name for path in Cache().root.glob("*/*/*.main.so")]
    assert len(entries) == 3 and {*entries} == {*compiled}
    assert inductor_worker() is worker


def inductor_worker():
    from torch._inductor import codecache

    return codecache._worker_compile_cpp


def test_the_machine_is_looked_at_as_inductor_does():
    from torch._inductor import cpu_vec_isa

    compiler.look_at_machine()
    assert cpu_vec_isa.pick_vec_isa() == (cpu_vec_isa.valid_vec_isa_list() or [None])[0]


def test_torchs_own_instructions_are_tried_lightly_and_others_as_inductor_does(monkeypatch):
    from torch._inductor.cpu_vec_isa import VecAVX2, VecISA

    tried = []
    monkeypatch.setattr(VecISA, "check_build", lambda self, code: tried.append(code) or True)
    for capability, light in (("AVX2", True), ("AVX512", True), ("DEFAULT", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        with compiler._light_trials():
            assert VecAVX2().check_build(VecISA._avx_code) and VecAVX2().check_build("another")
        heavy, other = tried[-2:]
        assert (heavy != VecISA._avx_code) is light and other == "another"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
def test_the_light_trial_compiles_loads_and_fails_where_the_compiler_cannot(monkeypatch, tmp_path):
    from torch._inductor.cpu_vec_isa import VecAVX2

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert VecAVX2().check_build(compiler._LIGHT)
    unknown = VecAVX2()
    unknown._arch_flags = "-mno-such-instructions"
    assert not unknown.check_build(compiler._LIGHT)


def test_a_trial_program_is_loaded_once(monkeypatch, tmp_path):
    from torch._inductor.cpu_vec_isa import VecAVX2, VecISA

    asked = []

    def probe(self, library):
        asked.append(library)
        return "good" in library

    monkeypatch.setattr(VecISA, "_probe_load", probe)
    good, bad = str(tmp_path / "good.so"), str(tmp_path / "bad.so")
    for _ in range(2):
        with compiler._remembering_what_loads():
            assert VecAVX2()._probe_load(good) and not VecAVX2()._probe_load(bad)
    assert asked == [good, bad, bad]
    assert VecISA._probe_load is probe
