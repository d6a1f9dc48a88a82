"""Parameter groups that are rearranged between steps: what the compiled update reads by place."""

import pytest
import torch
from torch import nn

import stepgraph
from stepgraph.errors import FrozenNumberError

BATCH = {"x": torch.ones(2, 4)}


def stepped():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[1].parameters(), "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups)
    loss = lambda m, b: m(b["x"]).square().mean()  # noqa: E731
    engine = stepgraph.Engine(model, loss=loss, optimizer=optimizer, lowering="eager")
    engine.step(BATCH)
    return model, engine, optimizer


def swap_members(groups):
    first, second = groups[0]["params"], groups[1]["params"]
    first[0], second[0] = second[0], first[0]


@pytest.mark.parametrize(
    "rearrange",
    [
        lambda groups: groups.reverse(),
        swap_members,
        lambda groups: groups[0]["params"].reverse(),
        lambda groups: groups[0].update(params=[*groups[1]["params"]]),
    ],
)
def test_groups_that_hold_other_parameters_are_an_error(rearrange):
    _, engine, optimizer = stepped()
    rearrange(optimizer.param_groups)
    with pytest.raises(FrozenNumberError, match="parameter group 0 .* holds other parameters"):
        engine.step(BATCH)


def test_a_group_that_grows_is_an_error():
    _, engine, optimizer = stepped()
    groups = optimizer.param_groups
    groups[0]["params"].append(groups[1]["params"].pop())
    with pytest.raises(FrozenNumberError, match="'parameters' of parameter group 0"):
        engine.step(BATCH)


def test_groups_that_were_loaded_are_the_same():
    model, engine, optimizer = stepped()
    saved = optimizer.state_dict()
    saved["param_groups"][1]["lr"] = 0.1
    optimizer.load_state_dict(saved)
    before = model[1].weight.full_tensor().clone()
    engine.step(BATCH)
    assert not torch.equal(model[1].weight.full_tensor(), before)
