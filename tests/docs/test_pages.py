"""The generated pages are those of the docstrings, and every pass that runs is on its page."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_page_is_up_to_date(name):
    assert (DOCS / name).read_text() == generate.PAGES[name](), "run python docs/generate.py"


def test_every_pass_that_the_pipeline_runs_is_documented():
    source = Path(DOCS.parent / "src/stepgraph")
    text = (source / "pipeline.py").read_text() + (source / "lowering/final.py").read_text()
    documented = {rewrite.__name__ for _, rewrite in generate.PASSES}
    for name in documented:
        assert name in text, f"{name} is documented but never run"
