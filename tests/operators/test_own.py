"""What the author of an operator says of it: the grammar of shardings, and what follows from it."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from stepgraph.errors import UsageError
from stepgraph.operators import own
from stepgraph.operators.own import parse_sharding
from stepgraph.operators.sharding import Rules
from stepgraph.program.program import tensors_of
from tests.operators.test_sharding import RANKS, local_results, one_operation
from tests.own_operators import (
    GROUPED,
    GROUPED_SHARDING,
    NORM,
    NORM_BACKWARD,
    norm_cost,
    registered,
    registered_norm,
)


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("rows _, _ -> rows _", ("rows",)),
        ("rows width, width -> rows width", ("rows", "width")),
        ("rows (width), (width) -> rows (width)", ("rows",)),
        ("rows width -> rows", ("rows",)),  # a result lacks width, and nobody said that it sums
        ("rows width+ -> rows", ("rows", "width")),
        ("rows+ _, rows _ -> rows _, _", ("rows",)),
        ("rows _, , -> rows _", ("rows",)),
        ("rows -> rows, ", ()),
        ("_ -> _", ()),
    ],
)
def test_names_are_ways_to_shard(text, ways):
    assert parse_sharding(text).ways == ways


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rows width", "'->'"),
        ("rows -> rows -> rows", "'->'"),
        ("rows wid-th -> rows", "'wid-th'"),
        ("rows* -> rows", "'rows*'"),
        ("rows rows -> rows", "rows twice"),
        ("rows -> rows other", "other"),
        ("rows (width) -> rows width", "width"),
        ("rows -> rows+", "'+'"),
        ("rows+ -> rows", "'+'"),
        ("(rows+) -> ", "'(rows+)'"),
    ],
)
def test_a_malformed_text_is_an_error_that_quotes_it(text, problem):
    with (
        pytest.raises(UsageError, match="tested.norm.default") as raised,
        registered(norm={"sharding": [text]}),
    ):
        pass
    assert repr(text) in str(raised.value) and problem in str(raised.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rows _, _, rows -> rows _, rows", "3 tensor arguments"),
        ("rows _, _ -> rows _", "1 results"),
    ],
)
def test_a_text_for_another_number_of_tensors_is_an_error(text, problem):
    with pytest.raises(UsageError, match=problem), registered(norm={"sharding": [text]}):
        pass


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rows, _ -> rows, rows", "argument 0 has shape"),
        ("rows _, _ -> rows _, rows _", "result 1 has shape"),
        ("rows _ -> rows _, rows", "argument 1 has shape"),
        ("rows _, rows -> rows _, rows", "rows is 4 and 6"),
    ],
)
def test_a_text_that_does_not_fit_a_call_is_an_error_there(text, problem):
    node = node_of(NORM, torch.randn(4, 6), torch.randn(6))
    with registered(norm={"sharding": text}), pytest.raises(UsageError) as raised:
        Rules(RANKS).strategies(node, (Replicate(), Replicate()))
    told = str(raised.value)
    assert "tested.norm.default" in told and repr(text) in told and problem in told


def test_every_way_is_right_by_execution():
    """Run on shards under each way, and joined, the result is the same."""
    with registered_norm(), registered(grouped={"sharding": GROUPED_SHARDING}):
        x, weight, gradient = torch.randn(4, 6, 8), torch.randn(8), torch.randn(4, 6, 8)
        _, scale = NORM(x, weight)
        for target, arguments, ways in (
            (NORM, (x, weight), 2),
            (NORM, (x[0], weight), 1),
            (NORM_BACKWARD, (gradient, x, weight, scale), 2),
            (GROUPED, (torch.randn(4, 6, 8), torch.randn(4, 8, 2)), 4),
        ):
            program, node, given = one_operation(target, arguments, {})
            found = Rules(RANKS).strategies(node, (Replicate(),) * len(arguments))
            assert len(found) == ways + 1  # and whole
            expected = tensors_of(target(*arguments))
            for strategy in found:
                results = local_results(program, node, strategy, given)
                for have, want in zip(results, expected, strict=True):
                    torch.testing.assert_close(have, want)


def node_of(target, *arguments):
    return one_operation(target, arguments, {})[1]


def test_a_sum_is_pending_where_it_is_said():
    with registered_norm():
        example = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6), torch.randn(4)
        found = Rules(RANKS).strategies(node_of(NORM_BACKWARD, *example), (Shard(0),) * 4)
    assert found[0].inputs == (Shard(0), Shard(0), Replicate(), Shard(0))
    assert found[0].outputs == (Shard(0), Partial("sum"))


def test_the_later_registration_replaces_the_earlier():
    with registered(norm={"sharding": "rows _, _ -> rows _, rows", "saves": (0,)}):
        first = own.REGISTERED[NORM]
        with registered(norm={"sharding": "rows _, _ -> rows _, rows", "saves": ["x"]}):
            assert own.REGISTERED[NORM] == first
        with registered(norm={"cost": norm_cost}):
            assert own.REGISTERED[NORM].sharding == ()


def test_who_has_no_record_has_no_way():
    node = node_of(NORM, torch.randn(4, 6), torch.randn(6))
    rules = Rules(RANKS)
    assert len(rules.strategies(node, (Shard(0), Replicate()))) == 1
    assert rules.without_rule == {"tested.norm.default"}
