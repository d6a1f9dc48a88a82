"""Models as people bring them, in training mode, equal to one process under zero3 and under tp."""

import functools

import pytest
import torch

from stepgraph.capture.step import Captured
from stepgraph.pipeline import ALL_RANKS, make
from stepgraph.planning.plan import preset_plan
from stepgraph.program import roles
from stepgraph.program.collectives import is_collective
from stepgraph.runtime.ranks import parse_mesh
from tests.end_to_end.models import MODELS, Brought, bring
from tests.one_process import OneProcessRun
from tests.sampling import sampled
from tests.support import HOST, notes_of

STEPS, RATE = 3, 0.1
# Ten layers deep, gradients are off by some 2^8 eps of their largest entry; SGD moves by the rate of that.
TOLERANCE = 256 * torch.finfo(torch.float32).eps

pytestmark = [
    # transformers 5.23 warns about its own attribute when peft asks for it.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


captured: dict[tuple[str, bool], Captured] = {}


@functools.cache
def trained(name, mesh, plan, dropout=True, **options):
    """Losses and the run; a model is captured once."""
    brought = bring(name, dropout)
    learned = [p for p in brought.model.parameters() if p.requires_grad]
    run = OneProcessRun(
        brought.model,
        loss=brought.loss,
        optimizer=torch.optim.SGD(learned, lr=RATE, momentum=0.9),
        mesh=mesh,
        plan=plan,
        captured=captured.get((name, dropout)),
        **options,
    )
    losses = [run.step(brought.batch).item() for _ in range(STEPS)]
    captured[name, dropout] = run.captured
    return losses, run


def buffers(run):
    return {
        role.name: parts[0]
        for role, parts in run._state.items()
        if isinstance(role, roles.Buffer) and parts[0].is_floating_point()
    }


def assert_equal(one, other):
    (losses, first), (expected, second) = one, other
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    for values, wanted in (
        (first.parameters(), second.parameters()),
        (buffers(first), buffers(second)),
    ):
        for name, value in wanted.items():
            scale = max(1.0, value.abs().max().item())
            torch.testing.assert_close(
                values[name],
                value,
                rtol=0,
                atol=TOLERANCE * scale,
                msg=lambda m, n=name: f"{n}: {m}",
            )


CELLS = [("zero3", "dp=2"), ("tp", "tp=2")]


def each(names=MODELS, slow=()):
    """The tests of a model on one worker: what is made for one serves the others."""
    grouped = [
        pytest.param(
            name,
            marks=[pytest.mark.xdist_group(name), *([pytest.mark.slow] if name in slow else [])],
        )
        for name in names
    ]
    return pytest.mark.parametrize("name", grouped)


@each(list(MODELS)[::4], slow=["vit"])
def test_two_ranks_train_as_one_does_with_dropout(name):
    expected = trained(name, "dp=1", "ddp")
    for plan, mesh in CELLS:
        assert_equal(trained(name, mesh, plan), expected)


@pytest.mark.slow
@each()
@pytest.mark.parametrize(
    ("plan", "mesh"), [("tp+sp+zero3", "dp=2,tp=2"), ("tp+hsdp", "replicate=2,shard=2,tp=2")]
)
def test_more_dimensions_train_as_one_rank_does_with_dropout(name, plan, mesh):
    assert_equal(trained(name, mesh, plan), trained(name, "dp=1", "ddp"))


@each(["gpt2", "unet", "convolutional"], slow=["unet"])
def test_recomputation_changes_no_bit(name):
    losses, run = trained(name, "dp=2", "zero3")
    again, recomputed = trained(name, "dp=2", "zero3", memory="full")
    assert again == losses
    for key, value in run.parameters().items():
        assert torch.equal(recomputed.parameters()[key], value), key


@each(list(MODELS)[1::4], slow=["lora"])
def test_without_dropout_it_is_plain_pytorch(name):
    brought = bring(name, dropout=False)
    model = brought.model
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9
    )
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = brought.loss(model, brought.batch) if brought.loss else model(**brought.batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    got, run = trained(name, "dp=2", "zero3", dropout=False)
    assert got == pytest.approx(losses, rel=TOLERANCE)
    for key, value in run.parameters().items():
        expected = model.get_parameter(key).detach()
        torch.testing.assert_close(value, expected, rtol=0, atol=TOLERANCE * 2, msg=key)


@each([name for name in MODELS if name not in ("mixtral", "whisper")])
def test_no_activation_travels_under_data_parallelism(name):
    """Nothing is gathered, and what is added up over ranks is no larger than a gradient."""
    _, run = trained(name, "dp=2", "ddp")
    alone = preset_plan("ddp", parse_mesh("dp=2"), schedule="none")  # no two collectives are one
    placed = make(run.captured.programs, alone, HOST, ALL_RANKS).programs["step"]
    moved = [
        node
        for node in placed.operations()
        if is_collective(node) and node.meta["phase"] != "optimizer"
    ]
    assert [node.meta["name"] for node in moved if "gather" in str(node.target)] == []
    largest = max(value.numel() for value in run.parameters().values())
    assert max(node.meta["val"].numel() for node in moved) <= largest
    assert not any("no sharding rule" in note for note in notes_of(run))


def gradients(brought, model):
    loss = brought.loss(model, brought.batch) if brought.loss else model(**brought.batch).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in brought.model.named_parameters() if p.requires_grad}


def qwen2():
    """As it comes: it returns a cache of keys, which begins with an empty tensor."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=101,
    )  # fmt: skip
    ids = torch.randint(0, 101, (2, 128))
    return Brought(Qwen2ForCausalLM(config), {"input_ids": ids, "labels": ids})


LOWERED = sampled([("eager", name) for name in MODELS], every=5)
LOWERED += [pytest.param("inductor", name, marks=pytest.mark.slow) for name in ("qwen2", *MODELS)]


@pytest.mark.parametrize(("lowering", "name"), LOWERED)
def test_the_bare_backend_is_plain_pytorch(lowering, name):
    brought, plain = (qwen2() if name == "qwen2" else bring(name, dropout=False) for _ in range(2))
    expected, wanted = gradients(plain, plain.model)
    compiled = torch.compile(brought.model, backend="stepgraph", options={"lowering": lowering})
    loss, found = gradients(brought, compiled)
    assert loss == pytest.approx(expected, rel=TOLERANCE)
    scale = max(gradient.abs().max().item() for gradient in wanted.values() if gradient is not None)
    for key, gradient in wanted.items():
        assert (gradient is None) == (found[key] is None), key
        if gradient is not None:
            torch.testing.assert_close(
                found[key], gradient, rtol=0, atol=TOLERANCE * scale, msg=key
            )


def test_modules_reached_through_wrappers_keep_their_names():
    _, run = trained("lora", "dp=1", "ddp")
    names = [node.meta["name"] for node in run.programs["step"].operations()]
    assert any("layers.0.self_attn.q_proj.lora_A.default" in name for name in names)
    assert not any("__dict__" in name for name in names)
