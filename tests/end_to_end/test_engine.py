"""What a script that holds an Engine can rely on, in one process with the eager lowering."""

import copy
import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import stepgraph
from stepgraph.errors import (
    BatchError,
    CheckpointError,
    FrozenNumberError,
    HookError,
    LossError,
    MeshError,
    OptimizerError,
    PlanError,
    RecompilationError,
    ShapeLimitError,
    StrictError,
    UnfilledModelError,
    UsageError,
)
from stepgraph.planning.plan import preset_plan
from stepgraph.runtime.ranks import parse_mesh
from tests.end_to_end.training import adamw, compare, llama_batch, tiny_llama
from tests.support import notes_of


class Regression(nn.Module):
    """Two linear layers and a mean squared error."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 1)

    def forward(self, x, y):
        return ((self.second(torch.tanh(self.first(x))) - y) ** 2).mean()


def pairs(rows: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)


def engine_for(model, optimizer="adamw", **settings):
    if optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings.setdefault("lowering", "eager")
    return stepgraph.Engine(model, optimizer=optimizer, **settings)


def eager_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    return loss.item()


# ------------------------------------------------------------------------------- it trains


def test_a_llama_trains_as_in_plain_pytorch():
    model = tiny_llama()
    engine = engine_for(model, adamw(model.parameters()), max_grad_norm=0.5)
    losses = [engine.step(llama_batch(step)).item() for step in range(10)]
    compare(losses, {n: p.full_tensor().detach() for n, p in engine.model.named_parameters()})


def test_two_engines_share_a_plan_that_nothing_changes():
    shared = preset_plan("zero3", parse_mesh("dp=1"))
    first, second = (engine_for(Regression(), plan=shared) for _ in range(2))
    assert first.step(pairs()) == second.step(pairs())
    first.evaluate(pairs())
    assert not shared.decisions
    decided = second.plan
    assert decided.decisions.keys() < first.plan.decisions.keys()
    third = engine_for(Regression(), plan=decided)
    assert third.step(pairs()) == engine_for(Regression()).step(pairs())
    assert third.plan == second.plan == decided


def test_parameters_become_dtensors_under_their_own_names_and_keep_their_identity_when_tied():
    model = tiny_llama()
    names = [name for name, _ in model.named_parameters()]
    engine = engine_for(model, adamw(model.parameters()))
    assert [name for name, _ in engine.model.named_parameters()] == names
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert engine.model is model


def test_a_learning_rate_changed_after_capture_takes_effect_without_compiling():
    model, reference = Regression(), Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    engine = engine_for(model, optimizer)
    for step in range(6):
        for group in (*optimizer.param_groups, *plain.param_groups):
            group["lr"] = 0.01 * (step + 1)
            group["betas"] = (0.9 - 0.05 * step, 0.99)
            group["weight_decay"] = 0.1 + 0.1 * step
        loss = engine.step(pairs(seed=step)).item()
        assert loss == pytest.approx(eager_step(reference, plain, pairs(seed=step)), rel=1e-5)
    assert engine.stats.compiles == 1


def test_a_number_that_changes_the_form_of_the_update_is_an_error_that_names_it():
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = engine_for(model, optimizer)
    engine.step(pairs())
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(FrozenNumberError, match="'momentum' of parameter group 0"):
        engine.step(pairs())


def test_an_in_place_operation_inside_a_recomputed_region_keeps_its_gradient():
    class InPlace(Regression):
        def block(self, x):
            h = self.first(x)
            h.mul_(2.0)  # sin's backward reads what this wrote
            return torch.sin(h)

        def forward(self, x, y):
            h = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
            return ((self.second(h) - y) ** 2).mean()

    model, reference = InPlace(), InPlace()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    engine = engine_for(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        loss = engine.step(pairs(seed=step)).item()
        assert loss == pytest.approx(eager_step(reference, optimizer, pairs(seed=step)), rel=1e-5)
    recomputed = [n for n in engine.programs["step"].operations() if "recomputed_from" in n.meta]
    assert recomputed


def test_micro_batches_give_the_step_of_the_whole_batch_again_and_again():
    model, reference = Regression(), Regression()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    engine = engine_for(model, micro_batches=4, strict=True)
    for step in range(4):  # accumulators are reused: a stale sum would show in the second step
        loss = engine.step(pairs(seed=step)).item()
        assert loss == pytest.approx(eager_step(reference, optimizer, pairs(seed=step)), rel=1e-5)


def test_without_an_optimizer_gradients_are_left_in_grad():
    model, reference = Regression(), Regression()
    reference(*pairs()).backward()
    engine = engine_for(model, None)
    engine.step(pairs())
    for own, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), wanted.grad)


def test_a_parameter_without_gradient_is_neither_updated_nor_decayed():
    model = Regression()
    model.unused = nn.Parameter(torch.ones(3))
    engine = engine_for(model)
    engine.step(pairs())
    assert torch.equal(model.unused.full_tensor(), torch.ones(3)) and model.unused.grad is None
    assert "unused" in engine.report()
    strict = Regression()
    strict.unused = nn.Parameter(torch.ones(3))
    with pytest.raises(StrictError, match="unused"):
        engine_for(strict, strict=True).step(pairs())


def test_frozen_parameters_stay_and_unfreezing_compiles_once_more():
    model = Regression()
    model.first.requires_grad_(False)
    before = model.first.weight.detach().clone()
    engine = engine_for(model)
    engine.step(pairs())
    assert torch.equal(model.first.weight.full_tensor(), before)
    model.first.requires_grad_(True)
    engine.step(pairs())
    engine.step(pairs())
    assert not torch.equal(model.first.weight.full_tensor(), before)
    (reason,) = engine.stats.recompiles
    assert "requires_grad changed: first.weight" in reason


def test_evaluate_returns_what_the_loss_returns_and_leaves_the_modes_alone():
    model, reference = Regression(), Regression()
    engine = engine_for(model, loss=lambda m, b: {"loss": m(*b), "input": b[0] * 2})
    model.second.eval()
    result = engine.evaluate(pairs())
    torch.testing.assert_close(result["loss"], reference(*pairs()).detach())
    torch.testing.assert_close(result["input"], pairs()[0] * 2)
    assert model.training and model.first.training and not model.second.training


def test_state_dicts_go_to_and_from_plain_pytorch():
    model, other = tiny_llama(), tiny_llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    engine = engine_for(model, adamw(model.parameters()))
    assert engine.state_dict().keys() == other.state_dict().keys()
    engine.load_state_dict(other.state_dict())
    for name, value in engine.state_dict().items():
        assert torch.equal(value.full_tensor(), other.state_dict()[name]), name
    with pytest.raises(CheckpointError, match="missing"):
        engine.load_state_dict({})


def test_a_model_on_the_meta_device_must_be_filled_first():
    with torch.device("meta"):
        model = Regression()
    filled = Regression()
    engine = engine_for(model)
    with pytest.raises(UnfilledModelError, match=r"first\.weight"):
        engine.step(pairs())
    engine.load_state_dict(filled.state_dict())
    assert engine.step(pairs()).item() == pytest.approx(filled(*pairs()).item(), rel=1e-5)


def test_the_same_seed_gives_the_same_run_bit_for_bit():
    runs = []
    for _ in range(2):
        model = Regression()
        engine = engine_for(model)
        runs.append([engine.step(pairs(seed=step)).item() for step in range(5)])
    assert runs[0] == runs[1]


def test_two_engines_do_not_know_of_each_other():
    first, second = Regression(), Regression(width=16)
    one, two = engine_for(first), engine_for(second, torch.optim.SGD(second.parameters(), lr=0.1))
    for step in range(3):
        one.step(pairs(seed=step))
        two.step(pairs(seed=step))
    assert one.stats.compiles == two.stats.compiles == 1


def test_a_deleted_engine_frees_its_state():
    model = Regression()
    engine = engine_for(model)
    engine.step(pairs())
    gone = weakref.ref(engine._state)
    del engine, model
    gc.collect()
    assert gone() is None


def test_capturing_keeps_what_else_the_process_has_compiled():
    compiled = []

    def backend(module, examples):
        compiled.append(module)
        return module

    other = torch.compile(nn.Linear(3, 3), backend=backend)
    other(torch.ones(2, 3))
    engine_for(Regression()).step(pairs())
    other(torch.ones(2, 3))
    assert len(compiled) == 1
    torch._dynamo.reset()


# ---------------------------------------------------------------------- nothing compiles again


def test_fifty_steps_with_scheduler_and_evaluation_compile_nothing():
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)
    engine = engine_for(model, optimizer)
    with stepgraph.no_recompiles(after=1):
        for step in range(50):
            engine.step(pairs(seed=step))
            scheduler.step()
            if step % 10 == 3:
                engine.evaluate(pairs(seed=step))
    assert engine.stats.compiles == 2 and engine.stats.steps == 50
    assert engine.stats.recompiles == []


def test_a_second_shape_compiles_once_and_the_ninth_is_an_error_that_lists_them():
    model = Regression()
    engine = engine_for(model)
    for _ in range(2):
        for rows in (2, 4):
            engine.step(pairs(rows))
    assert engine.stats.compiles == 2 and len(engine.stats.recompiles) == 1
    for rows in (6, 8, 10, 12, 14, 16):
        engine.step(pairs(rows))
    with pytest.raises(ShapeLimitError, match=r"0 \[2, 4\].*0 \[16, 4\]"):
        engine.step(pairs(18))
    engine.step(pairs(2))
    assert engine.stats.compiles == 8


def test_a_compilation_past_warm_up_raises_with_its_reason():
    engine = engine_for(Regression())
    with stepgraph.no_recompiles(after=1):
        engine.step(pairs(4))
        with pytest.raises(RecompilationError, match=r"new batch shape: 0 \[6, 4\]"):
            engine.step(pairs(6))
    engine.step(pairs(6))


# -------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"plan": "zero4"}, UsageError, "did you mean 'zero.'.*known: ddp, zero1, zero2, zero3"),
        ({"memory": "ful"}, UsageError, "did you mean 'full'"),
        ({"memory": "layers:0"}, UsageError, "layers:0"),
        ({"lowering": "inductr"}, UsageError, "did you mean 'inductor'"),
        ({"schedule": "fast"}, UsageError, "known: none"),
        ({"mesh": "dp=4"}, MeshError, "has 4 ranks, but 1 is running"),
        ({"mesh": "dp:4"}, MeshError, "is not understood"),
        ({"mesh": "dp=0"}, MeshError, "is not understood"),
        ({"mesh": "tp=1"}, MeshError, "lacks dp"),
        ({"plan": "hsdp"}, MeshError, "lacks replicate, shard"),
        ({"micro_batches": 0}, BatchError, "positive whole number"),
        ({"compute_dtype": torch.int8}, UsageError, "floating-point torch.dtype"),
        ({"plan": "no-such-file.json"}, stepgraph.errors.PlanError, "no plan file"),
    ],
)
def test_bad_settings_are_errors_that_say_what_is_known(settings, error, message):
    model = Regression()
    with pytest.raises(error, match=message):
        engine_for(model, **settings)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_an_optimizer_over_other_parameters_is_an_error():
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="not parameters of the model"):
        engine_for(Regression(), other)


def test_batches_that_do_not_divide_or_disagree_are_errors():
    engine = engine_for(Regression(), micro_batches=3)
    with pytest.raises(BatchError, match="8 rows.*3 micro-batches"):
        engine.step(pairs(8))
    with pytest.raises(BatchError, match="agree in dimension 0"):
        engine.step((torch.ones(4, 4), torch.ones(2, 1)))
    with pytest.raises(BatchError, match="must hold tensors"):
        engine.step({})


class Branches(Regression):
    def forward(self, x, y):
        if x.sum() > -1e9:
            x = x + 1
        return super().forward(x, y)


def test_control_flow_that_depends_on_data_names_its_line():
    with pytest.raises(StrictError, match=r"test_engine.py:\d+ in forward"):
        engine_for(Branches(), strict=True).step(pairs())
    with pytest.raises(PlanError, match=r"whole.*\n.*test_engine.py:\d+ in forward"):
        engine_for(Branches(), mesh="tp=1", plan="tp").step(pairs())


def test_a_model_that_cannot_be_captured_whole_runs_graph_by_graph_and_says_so():
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_for(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2)
    for _ in range(3):
        loss = plain(*pairs())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(engine.step(pairs()), loss.detach())
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.to_local(), wanted)
    assert re.search(r"graph by graph, because of .*test_engine.py:\d+", engine.report())
    torch.testing.assert_close(engine.evaluate(pairs()), plain(*pairs()).detach())


def test_a_loss_that_is_no_scalar_is_an_error():
    with pytest.raises(LossError, match="must be a floating-point scalar"):
        engine_for(Regression(), loss=lambda m, b: m.first(b[0])).step(pairs())


def test_gradient_hooks_registered_before_or_after_are_honoured():
    torch.manual_seed(0)
    model = Regression()
    plain = copy.deepcopy(model)
    handle = model.first.weight.register_hook(lambda g: g * 2)
    plain.first.weight.register_hook(lambda g: g * 2)
    engine = engine_for(model, None)
    engine.step(pairs())
    plain(*pairs()).backward()
    torch.testing.assert_close(model.first.weight.grad.to_local(), plain.first.weight.grad)
    handle.remove()
    engine.step(pairs())
    torch.testing.assert_close(model.first.weight.grad.to_local(), plain.first.weight.grad / 2)

    later, seen = engine_for(Regression(), None), []
    later.step(pairs())
    later.model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    later.step(pairs())
    assert seen[0] is later.model.second.weight.grad
    with pytest.raises(StrictError, match=r"second\.weight"):
        strict = engine_for(Regression(), strict=True)
        strict.model.second.weight.register_hook(lambda g: g)
        strict.step(pairs())


def test_optimizer_step_hooks_are_errors_not_dropped():
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_for(model, optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(HookError, match="step hooks"):
        engine.step(pairs())


def test_a_hook_on_an_activation_is_honoured():
    class Hooked(Regression):
        def forward(self, x, y):
            h = torch.tanh(self.first(x))
            h.register_hook(lambda g: g * 3)
            return ((self.second(h) - y) ** 2).mean()

    model, reference = Hooked(), Hooked()
    reference(*pairs()).backward()
    engine_for(model, None).step(pairs())
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), reference.first.weight.grad)


def test_a_wrapped_model_is_refused():
    class FSDPModule(Regression):
        pass

    with pytest.raises(UsageError, match="wrapped in FSDPModule already"):
        engine_for(FSDPModule())


def test_check_finds_every_pass_right_and_changes_nothing():
    model = Regression()
    engine = engine_for(model, max_grad_norm=1.0)
    engine.step(pairs())
    before = [p.detach().full_tensor().clone() for p in model.parameters()]
    report = stepgraph.check(engine, pairs())
    assert report.ok and report.first_difference is None
    after = [p.full_tensor() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_plan_file_replays_its_decisions(tmp_path):
    first = Regression()
    engine = engine_for(first, plan="zero2")
    engine.step(pairs())
    engine.plan.save(tmp_path / "plan.json")
    second = Regression()
    again = engine_for(second, plan=tmp_path / "plan.json")
    again.step(pairs())
    assert str(again.programs["step"]) == str(engine.programs["step"])


def test_a_plan_file_of_another_model_says_what_differs(tmp_path):
    engine = engine_for(Regression(), plan="zero2")
    engine.step(pairs())
    engine.plan.save(tmp_path / "plan.json")
    other = tiny_llama()
    with pytest.raises(stepgraph.errors.PlanError, match="embed_tokens"):
        engine_for(other, adamw(other.parameters()), plan=tmp_path / "plan.json")


# --------------------------------------------------- what changes between steps is never ignored


def test_a_submodule_set_to_evaluation_between_steps_compiles_again():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    engine = engine_for(model, loss=lambda m, b: m(b).square().mean())
    engine.step(pairs()[0])
    model[1].eval()
    before = model[1].running_mean.clone()
    engine.step(pairs()[0])
    assert torch.equal(model[1].running_mean, before)
    assert "mode" in engine.stats.recompiles[0]


@pytest.mark.parametrize("change", [{"maximize": True}, {"betas": (0.1,)}, {"lr": "high"}])
def test_a_setting_of_a_parameter_group_that_changes_is_an_error(change):
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = engine_for(model, optimizer)
    engine.step(pairs())
    optimizer.param_groups[0].update(change)
    with pytest.raises(FrozenNumberError, match="changed after|changed from"):
        engine.step(pairs())


def test_an_optimizer_without_states_has_none():
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepgraph.Engine(model, optimizer=optimizer, lowering="eager").step(pairs())
    assert optimizer.state_dict()["state"] == {}


def test_the_optimizers_state_dict_is_current_and_can_be_loaded():
    model, reference = Regression(), Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    engine = engine_for(model, optimizer)
    for step in range(3):
        engine.step(pairs(seed=step))
        eager_step(reference, plain, pairs(seed=step))
    own, wanted = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert own.keys() == wanted.keys()
    for index, state in wanted.items():
        for key, value in state.items():
            held = own[index][key]
            held = held.full_tensor() if isinstance(held, DTensor) else held
            torch.testing.assert_close(held, value, rtol=1e-4, atol=1e-7)
    fresh = torch.optim.AdamW(Regression().parameters(), lr=0.01)
    zeroed = {
        "state": {
            i: {k: torch.zeros_like(v) for k, v in state.items()} for i, state in wanted.items()
        },
        "param_groups": fresh.state_dict()["param_groups"],
    }
    optimizer.load_state_dict(zeroed)
    plain.load_state_dict(zeroed)
    for step in range(3):
        loss = engine.step(pairs(seed=step)).item()
        assert loss == pytest.approx(eager_step(reference, plain, pairs(seed=step)), rel=1e-5)


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_named():
    class Holder:
        __slots__ = ("weights",)

    held = Holder()
    held.weights = torch.rand(8, 1)
    with pytest.raises(stepgraph.errors.CaptureError, match="neither a parameter nor a buffer"):
        engine_for(Regression(), loss=lambda m, b: m(*b) * held.weights.sum()).step(pairs())


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3"])
def test_batch_norm_accumulates_over_micro_batches(plan):
    from tests.one_process import OneProcessRun

    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    run = OneProcessRun(
        model,
        loss=lambda m, b: m(b).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mesh="dp=2",
        plan=plan,
        micro_batches=3,
    )
    run.step(pairs(12)[0])
    assert "mean over micro-batches" in notes_of(run)[0]


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_a_transformer_layer_and_a_recurrent_net_are_right_on_three_ranks(plan):
    from tests.one_process import OneProcessRun

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    for model, width in ((layer, 8), (nn.GRU(1, 8, batch_first=True), 1)):
        batch = torch.randn(6, 5, width, generator=torch.Generator().manual_seed(1))

        def loss(module, x):
            result = module(x)
            return (result[0] if isinstance(result, tuple) else result).square().mean()

        run = OneProcessRun(model, loss=loss, mesh="dp=3", plan=plan, memory="full")
        assert run.step(batch).item() == pytest.approx(loss(model, batch).item(), rel=1e-5)
