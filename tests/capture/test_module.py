"""capture: a module becomes one Program, in the model's own names."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from stepgraph.capture.module import capture, default_loss
from stepgraph.errors import GraphBreakError, HookError, LossError
from stepgraph.program import roles
from stepgraph.program.invariants import check_invariants
from stepgraph.program.program import BACKWARD
from tests.support import (
    assert_summation,
    captured,
    eager,
    mlp,
    regression_batch,
    spec_of,
    tiny_llama,
    token_batch,
    values,
)


class Net(nn.Module):
    """A linear layer and whatever ``forward`` is given."""

    def __init__(self, run=None, *, dropout=0.0):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(dropout)
        self.run = run or (lambda net, x: net.linear(x).mean())

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


X = torch.randn(4, 3)


def assert_like_eager(model, batch, loss=default_loss):
    program = captured(model, batch, loss)
    check_invariants(program)
    found, expected = values(model, batch).execute(program), eager(model, batch, loss)
    named = {roles.Loss(): expected.pop("loss")}
    named |= {roles.Grad(name): value for name, value in expected.items()}
    assert {role for role in program.outputs if isinstance(role, roles.Grad)} == set(named) - {
        roles.Loss()
    }
    assert_summation(named, found)
    return program


def test_loss_and_gradients_are_those_of_eager():
    assert_like_eager(mlp(), regression_batch())
    assert_like_eager(tiny_llama(1), token_batch())


def test_tied_weights_are_one_parameter_under_its_first_name():
    model = tiny_llama(1, tie_word_embeddings=True)
    program = assert_like_eager(model, token_batch())
    names = [role.name for role in program.inputs if isinstance(role, roles.Param)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_a_frozen_parameter_gets_no_gradient():
    model = mlp()
    model.first.weight.requires_grad_(False)
    program = assert_like_eager(model, regression_batch())
    assert roles.Param("first.weight") in program.inputs
    assert roles.Grad("first.weight") not in program.outputs


def test_the_first_of_several_outputs_is_the_loss():
    model = Net(lambda net, x: (net.linear(x).mean(), net.linear(x)))
    program = captured(model, X, loss=lambda m, x: m(x))
    assert [role for role in program.outputs if not isinstance(role, roles.Grad)] == [roles.Loss()]


def test_evaluation_keeps_every_output_and_the_structure():
    model = Net(lambda net, x: {"y": net.linear(x), "pair": (x.sum(), x.mean())})
    program, results, _ = capture(model, lambda m, x: m(x), spec_of(X), training=False)
    assert program.outputs == [roles.UserOutput(i) for i in range(3)]
    result = results.rebuild({0: 0, 1: 1, 2: 2})
    assert set(result) == {"y", "pair"}
    assert not list(program.operations(BACKWARD))


def test_constants_of_a_keyword_batch_are_part_of_the_program():
    model = Net(
        lambda net, x, scale, mode: (net.linear(x) * scale).sum() if mode == "sum" else None
    )
    program = assert_like_eager(model, {"x": X, "scale": 3.0, "mode": "sum"})
    found = [role for role in program.inputs if isinstance(role, roles.UserInput)]
    assert [role.name for role in found] == ["x"]


def test_a_model_on_the_meta_device_gives_the_same_program():
    real, batch = tiny_llama(1), token_batch()
    text = str(captured(real, batch))
    buffers = {name: value.clone() for name, value in real.named_buffers()}
    meta = tiny_llama(1).to("meta")
    assert str(captured(meta, batch)) == text
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert buffers


def test_the_model_is_left_as_it_was():
    model = mlp()
    before = dict(model.named_parameters())
    captured(model, regression_batch())
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_capture_failed_on_is_left_as_it_was_too():
    model = Net(lambda net, x: net.linear(x).mean() if x.sum() > 0 else x.mean())
    before = dict(model.named_parameters())
    with pytest.raises(GraphBreakError):
        captured(model, X)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


def test_operations_in_checkpoint_regions_are_tagged_by_region():
    def run(net, x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(
                lambda x: torch.tanh(net.linear(x)), x, use_reentrant=False
            )
        return x.sin().mean()

    program = captured(Net(run), X)
    tagged = [node for node in program.operations() if "checkpoint" in node.meta]
    assert len({node.meta["checkpoint"] for node in tagged}) == 2
    assert {"tanh", "sin"} & {n.target._schema.name.split("::")[1] for n in tagged} == {"tanh"}


def test_a_buffer_that_the_forward_writes_is_a_result():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x):
            self.seen.add_(x.detach().sum(0))
            return (self.linear(x) * self.seen).mean()

    model = Counting()
    program = captured(model, X)
    assert roles.NewBuffer("seen") in program.outputs
    torch.testing.assert_close(values(model, X).execute(program)[roles.NewBuffer("seen")], X.sum(0))
    assert not model.seen.any()


def test_what_is_not_read_goes_without_taking_its_likeness():
    """The unused weight has the shape of the used one, which comes before it."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x).mean()

    program = assert_like_eager(Unused(), (X,))
    params = [role.name for role in program.inputs if isinstance(role, roles.Param)]
    assert params == ["used.weight", "used.bias"]


def test_a_buffer_that_is_written_and_never_read_is_written():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("last", torch.zeros(4, 3))

        def forward(self, x):
            y = self.linear(x)
            self.last.copy_(y.detach())
            return y.mean()

    model = Last()
    program = captured(model, (X,))
    found = values(model, (X,)).execute(program)
    torch.testing.assert_close(found[roles.NewBuffer("last")], model.linear(X))


def test_a_check_of_a_result_is_left_out_and_said():
    class Solve(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return torch.linalg.solve(self.linear(x)[:3] + 5 * torch.eye(3), x[:3]).mean()

    program = assert_like_eager(Solve(), (X,))
    assert any("torch.linalg.solve" in note for note in program.notes)


def test_module_paths_and_stable_names_survive_another_capture():
    def names():
        program = captured(tiny_llama(2), token_batch())
        return [(node.meta["module"], node.meta["name"]) for node in program.operations()]

    first = names()
    assert first == names()
    assert "model.layers.1.self_attn.q_proj" in {module for module, _ in first}
    assert "model.layers.1.self_attn.q_proj/mm" in {name for _, name in first}
    assert any(name.endswith("/attention") for _, name in first)
    assert len({name for _, name in first}) == len(first)


# ---------------------------------------------------------------------------------------- refusals


def test_a_branch_on_data_names_its_line():
    def run(net, x):
        y = net.linear(x)
        if y.sum() > 0:  # the line
            y = y * 2
        return y.mean()

    with pytest.raises(GraphBreakError, match=r"test_module.py:\d+ in run: if y.sum\(\) > 0"):
        captured(Net(run), X)


def test_a_size_that_is_read_out_names_its_line():
    with pytest.raises(GraphBreakError, match=r"test_module.py:\d+"):
        captured(Net(lambda net, x: net.linear(x)[: int(x.sum())].mean()), X)


@pytest.mark.parametrize("quiet", [lambda m: m.eval(), lambda m: setattr(m.drop, "p", 0.0)])
def test_a_dropout_that_drops_nothing_is_captured(quiet):
    model = Net(lambda net, x: net.drop(net.linear(x)).mean(), dropout=0.5)
    quiet(model)
    assert_like_eager(model, X)


def test_gradient_hooks_are_refused_by_name():
    model = mlp()
    model.first.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(HookError, match="first.weight"):
        captured(model, regression_batch())
    model = mlp()
    model.second.register_full_backward_hook(lambda *args: None)
    with pytest.raises(HookError, match="second"):
        captured(model, regression_batch())


LOSSES = {
    "no scalar": (lambda net, x: net.linear(x), r"got shape \[4, 3\]"),
    "a whole number": (lambda net, x: net.linear(x).argmax(), "got shape|no parameter"),
    "detached": (lambda net, x: net.linear(x).mean().detach(), "gradient|detached|got"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_be_trained_on_says_why(name):
    run, message = LOSSES[name]
    with pytest.raises(LossError, match=message):
        captured(Net(run), X)
