import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.planning.folding import as_seen, fold, fold_by, layer_of, seen_from, unfold


def free(count):
    pass


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.self_attn/mul.1", ("model.layers.*.self_attn/mul.1", 3)),
        ("model.layers.31/add", ("model.layers.*/add", 31)),
        ("Param(model.layers.0.norm.weight)", ("Param(model.layers.*.norm.weight)", 0)),
        ("0.attention.1.weight", ("*.attention.1.weight", 0)),
        ("model/slice.1", ("model/slice.1", None)),
        ("x/view.1.backward", ("x/view.1.backward", None)),
        ("layers.03.norm/mul", ("layers.03.norm/mul", None)),
        ("layers.3.odd*name/mul", ("layers.3.odd*name/mul", None)),
        ("UserInput(0.labels)", ("UserInput(0.labels)", None)),
    ],
)
def test_the_layer_of_a_name(name, expected):
    assert layer_of(name) == expected


def test_repeated_layers_are_written_once():
    names = [f"model.layers.{i}.mlp/{op}" for i in (0, 1, 2, 7) for op in ("mul", "add")]
    folded = fold([*names, "lm_head/mm"])
    assert folded == {
        "": ["lm_head/mm"],
        "0-2,7": ["model.layers.*.mlp/add", "model.layers.*.mlp/mul"],
    }


PARTS = st.sampled_from(["a", "layers", "0", "1", "12", "007", "b*c", "x"])
NAMES = st.builds(
    lambda path, tail: ".".join(path) + tail,
    st.lists(PARTS, min_size=1, max_size=4),
    st.sampled_from(["", "/mm", "/mm.1", "/mul.backward.2"]),
)


@given(st.dictionaries(NAMES, st.integers(0, 2)))
def test_any_names_come_back(values):
    back = {}
    for value, folded in fold_by(values).items():
        back |= dict.fromkeys(unfold(folded, free), value)
    assert back == values


@given(NAMES, st.one_of(st.none(), st.integers(0, 13)))
def test_a_name_seen_from_a_layer_comes_back(name, layer):
    if "*" not in name:
        assert as_seen(seen_from(name, layer), layer) == name


@pytest.mark.parametrize("layers", ["x", "1-", "5-2", "0-9999999", "1,,2", "-1"])
def test_layers_that_are_not_understood(layers):
    with pytest.raises(ValueError, match="layers"):
        unfold({layers: ["a.*.b"]}, free)


def test_names_are_counted_before_they_are_made():
    spent = []

    def stop(count):
        spent.append(count)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        unfold({"0-999999": ["a.*.b"] * 3}, stop)
    assert spent == [3_000_000]
