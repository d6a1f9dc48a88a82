"""The kernels of a graph are compiled together: the same kernels, in fewer calls of the compiler."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.lowering.cache import Cache
from stepgraph.lowering.inductor import _compiled
from stepgraph.torch_internals import together
from tests.support import HOST

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries of Linux alone")


def model(x, y):
    first = torch.softmax(torch.cos(x) @ y, -1)
    second = torch.layer_norm(first @ first.T, (32,))
    return second, torch.tanh(second.sum(0) + 1), x.sin().cumsum(0)


@pytest.fixture
def compile_(monkeypatch, tmp_path):
    """Compiles the model in a new folder; what it computes, and the texts that the compiler was given."""
    monkeypatch.setattr(together, "_cores", lambda: 1)
    run, texts = subprocess.run, []

    def listening(command, *args, **kwargs):
        texts.extend(word for word in command if str(word).endswith(".cpp"))
        return run(command, *args, **kwargs)

    monkeypatch.setattr(together.subprocess, "run", listening)
    torch.manual_seed(0)  # the variance that is divided by is small, and of some draws very small
    x, y = torch.randn(32, 48), torch.randn(48, 64)
    number = iter(range(9))

    def compiled():
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / str(next(number))))
        texts.clear()
        module = make_fx(model, tracing_mode="fake")(x, y)
        (made,) = _compiled([(module, module.graph.find_nodes(op="placeholder"))], HOST)
        libraries = [*Cache().root.glob("*/*/*.main.so")]
        assert len(libraries) > 2 and not [*Cache().root.glob("*/*/*.all")]
        return made([x, y]), [*texts], libraries

    return compiled, lambda: model(x, y)


def test_all_kernels_are_one_text_and_compute_to_the_bit_what_they_do_apart(compile_, monkeypatch):
    compiled, eager = compile_
    joined, texts, libraries = compiled()
    assert len({text for text in texts if ".together." in text}) == 1
    monkeypatch.setattr(together, "_cores", lambda: 64)
    apart, texts, same = compiled()
    assert not [text for text in texts if ".together." in text]
    assert {path.name for path in libraries} == {path.name for path in same}
    for ours, theirs, plain in zip(joined, apart, eager(), strict=True):
        assert torch.equal(ours, theirs) and torch.allclose(ours, plain, atol=1e-5)


def test_what_cannot_be_compiled_together_is_compiled_apart(compile_, monkeypatch):
    compiled, eager = compile_
    monkeypatch.setattr(together, "_INCLUDED", "#error two of a kind\n")
    found, texts, _ = compiled()
    assert [text for text in texts if ".together." in text]
    for ours, plain in zip(found, eager(), strict=True):
        assert torch.allclose(ours, plain, atol=1e-5)


def test_a_compiler_that_fails_is_inductors_error(compile_, monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InductorError

    compiled, _ = compile_
    compiled()
    command = cpp_builder.CppBuilder.get_command_line
    monkeypatch.setattr(
        cpp_builder.CppBuilder, "get_command_line", lambda self: f"{command(self)} -fno-such-option"
    )
    with pytest.raises((InductorError, RuntimeError), match="fno-such-option|compile error"):
        compiled()


def test_nothing_is_left_of_it(compile_):
    from torch._inductor import codecache
    from torch._inductor.async_compile import AsyncCompile

    before = codecache._worker_compile_cpp, AsyncCompile.submit
    compile_[0]()
    assert (codecache._worker_compile_cpp, AsyncCompile.submit) == before


def test_ranks_of_a_machine_share_its_cores(monkeypatch):
    from torch._inductor import async_compile

    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 16)
    for ranks, cores in (("1", 16), ("8", 2), ("64", 1), ("", 16), ("0", 16), ("many", 16)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert together._cores() == cores


@pytest.mark.parametrize(
    ("sizes", "cores", "parts"),
    [
        ([9] * 4, 1, 1),
        ([9] * 4, 2, 2),
        ([9] * 3, 16, 3),
        ([9] * 20, 2, 3),
        ([60, 20, 20, 20], 2, 2),
    ],
)
def test_texts_are_as_many_as_cores_or_more_where_kernels_are_many(
    sizes, cores, parts, monkeypatch, tmp_path
):
    monkeypatch.setattr(together, "_cores", lambda: cores)
    wanted = []
    for number, size in enumerate(sizes):
        source = tmp_path / f"{number}.cpp"
        source.write_bytes(b" " * size)
        wanted.append(SimpleNamespace(source=source, file=source.with_suffix(".so")))
    found = together._shared_out(wanted)
    lengths = [sum(one.source.stat().st_size for one in part) for part in found]
    assert len(found) == parts and max(lengths) - min(lengths) <= min(sizes)
    assert sorted(one.file for part in found for one in part) == sorted(w.file for w in wanted)


def test_a_folder_whose_name_is_no_one_word_is_left_to_inductor(tmp_path):
    made = []
    (tmp_path / "a b").mkdir()
    file = tmp_path / "a b" / "k.main.so"
    file.with_suffix(".cpp").write_text("")
    builder = SimpleNamespace(
        get_target_file_path=lambda: str(file),
        get_command_line=lambda: f"g++ {file.with_suffix('.cpp')} -o {file}",  # as inductor does
    )
    batch = together._Batch(
        lambda files, make: make(files), lambda task: SimpleNamespace(result=task)
    )
    for _ in range(2):
        batch.add(together._Wanted(builder, lambda: made.append(file)))
    batch.result()
    assert made == [file, file] and not batch.waiting
