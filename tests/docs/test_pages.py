"""The generated pages are those of the source, and every pass that runs is on its page."""

import importlib.util
from pathlib import Path

import pytest

from stepgraph.pipeline import ROADS

DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_page_is_up_to_date(name):
    assert (DOCS / name).read_text() == generate.PAGES[name](), "run python docs/generate.py"


def test_every_pass_of_a_road_is_on_its_page():
    page = generate.passes_page()
    for step in {step.name for road in ROADS.values() for step in road}:
        assert f"### `{step}`" in page
