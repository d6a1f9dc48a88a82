"""Batches of varying length, padded to a few: the same training, on one rank and on two."""

import collections
import os

import pytest
import torch
import torch.nn.functional as F

import stepgraph
from stepgraph.cli.launcher import launch
from stepgraph.errors import BatchError, LaunchError, UsageError
from tests.sampling import sampled
from tests.support import VOCABULARY, tiny_llama

ROWS, STEPS, RATE = 2, 6, 0.1


def text_batch(length, seed, mask=True):
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (ROWS, length), generator=random)
    labels = ids.clone()
    labels[0, : length // 2] = -100
    batch = {"input_ids": ids, "labels": labels}
    return batch | ({"attention_mask": torch.ones_like(ids)} if mask else {})


def only(loader, **options):
    (batch,) = stepgraph.pad_batches(loader, **options)
    return batch


@pytest.mark.parametrize(
    ("options", "length", "padded"),
    [
        ({"multiple": 4}, 5, 8),
        ({"multiple": 4}, 8, 8),
        ({"multiple": 1}, 5, 5),
        ({"lengths": [16, 6]}, 5, 6),
        ({"lengths": [16, 6]}, 7, 16),
    ],
)
def test_each_tensor_is_padded_with_what_counts_for_nothing(options, length, padded):
    batch = text_batch(length, 0)
    found = only([batch], **options, pad_token_id=9)
    fills = {"input_ids": 9, "labels": -100, "attention_mask": 0}
    for name, fill in fills.items():
        assert found[name].shape == (ROWS, padded)
        assert torch.equal(found[name][:, :length], batch[name])
        assert (found[name][:, length:] == fill).all()


def test_what_has_no_sequence_stays_and_names_decide():
    batch = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "inputs_embeds": torch.ones(2, 3, 5),
        "key_padding_mask": torch.zeros(2, 3, dtype=torch.bool),
        "position_ids": torch.ones(2, 3, dtype=torch.long),
        "segment": {"token_ids": torch.ones(2, 3, dtype=torch.long)},
        "features": torch.ones(2, 7),
        "weight": torch.ones(2),
        "name": "a string",
    }
    found = only([batch], multiple=4, pad_token_id=9, fills={"position_ids": 5})
    assert found["inputs_embeds"].shape == (2, 4, 5) and found["inputs_embeds"][:, 3].eq(0).all()
    assert found["key_padding_mask"][:, 3].all() and not found["key_padding_mask"][:, :3].any()
    assert found["position_ids"][:, 3].eq(5).all()
    assert found["segment"]["token_ids"][:, 3].eq(9).all()
    for name in ("features", "weight", "name"):
        assert found[name] is batch[name]


def test_tuples_need_a_fill_for_integers():
    batch = (torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(BatchError, match="'1' of the batch has no name"):
        only([batch], multiple=4)
    x, y = only([batch], multiple=4, fills={"1": -100})
    assert x[:, 3].eq(0).all() and y[:, 3].eq(-100).all()


def test_a_mapping_that_is_no_dict_becomes_one():
    assert type(only([collections.UserDict(text_batch(3, 0))], multiple=4)) is dict


def test_it_is_lazy_as_long_as_its_loader_and_iterated_again():
    taken = []

    class Loader:
        def __len__(self):
            return 3

        def __iter__(self):
            for number in range(3):
                taken.append(number)
                yield text_batch(3 + number, number)

    padded = stepgraph.pad_batches(Loader(), multiple=4)
    assert len(padded) == 3 and taken == []
    first = iter(padded)
    next(first)
    assert taken == [0]
    assert (
        [b["labels"].shape[1] for b in padded]
        == [b["labels"].shape[1] for b in padded]
        == [4, 4, 8]
    )
    with pytest.raises(TypeError):
        len(stepgraph.pad_batches(iter([]), multiple=4))


@pytest.mark.parametrize(
    "options",
    [{}, {"multiple": 0}, {"multiple": -8}, {"multiple": 4, "lengths": [8]}, {"lengths": []},
     {"lengths": [8, 0]}, {"multiple": 2.5}],
)  # fmt: skip
def test_arguments_that_cannot_be_used_are_errors_at_once(options):
    with pytest.raises(UsageError):
        stepgraph.pad_batches([], **options)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"x": torch.ones(3)}, "no tensor of the batch has a sequence"),
        ({"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 4)}, "input_ids has 3, labels has 4"),
        ({"x": torch.ones(2, 3), "y": torch.ones(2, 4)}, "x has 3, y has 4"),
        ({"x": torch.ones(2, 9)}, "a sequence of 9 is longer than the longest"),
        ({"x": torch.ones(2, 3), "attention_mask": torch.ones(2, 1, 3, 3), "input_ids": torch.ones(2, 3)},
         "is a mask of shape"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_padded_are_errors_that_say_why(batch, problem):
    with pytest.raises(BatchError, match=problem):
        only([batch], lengths=[4, 8])


# ------------------------------------------------------------------------------------- training

LENGTHS = {0: [3, 11, 6, 7, 2, 9], 1: [5, 4, 12, 8, 3, 5]}


def batches(rank, mask):
    return [text_batch(length, 10 * i + rank, mask) for i, length in enumerate(LENGTHS[rank])]


def expected(ranks, mask):
    """Plain PyTorch on sequences as they are: the sum over all ranks' tokens over their number."""
    model = tiny_llama(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for parts in zip(*(batches(rank, mask) for rank in ranks), strict=True):
        total, count = torch.zeros(()), 0
        for part in parts:
            logits = model(input_ids=part["input_ids"]).logits[:, :-1].flatten(0, 1)
            labels = part["labels"][:, 1:].flatten()
            total = total + F.cross_entropy(logits, labels, reduction="sum")
            count += (labels != -100).sum()
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train(mask):
    rank = int(os.environ.get("RANK", "0"))
    model = tiny_llama(1)
    engine = stepgraph.Engine(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), lowering="eager"
    )
    padded = stepgraph.pad_batches(batches(rank, mask), multiple=4)
    losses = [engine.step(batch).item() for batch in padded]
    whole = {name: p.detach().full_tensor() for name, p in engine.model.named_parameters()}
    return losses, whole, engine.stats.compiles


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mask"), sampled([(2, True), (1, False)]))
def test_padded_sequences_train_like_those_that_are_not(ranks, mask):
    losses, parameters = expected(range(ranks), mask)
    for found, trained, compiles in launch(train, mask, ranks=ranks):
        assert found == pytest.approx(losses, rel=1e-4)
        for name, value in parameters.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-5)
        assert compiles <= 3  # 4, 8 and 12, of the longest over ranks


def uneven():
    rank = int(os.environ["RANK"])
    return sum(1 for _ in stepgraph.pad_batches(batches(0, True)[: 3 + rank], multiple=4))


def test_a_loader_that_ends_first_is_an_error_on_every_rank():
    with pytest.raises(LaunchError, match="ended after 3 batches"):
        launch(uneven, ranks=2)


def one_is_too_long():
    rank = int(os.environ["RANK"])
    list(stepgraph.pad_batches([text_batch(3 + 6 * rank, 0)], lengths=[4, 8]))


def test_a_batch_that_one_rank_cannot_pad_stops_all():
    with pytest.raises(LaunchError, match="cannot be padded|longer than the longest"):
        launch(one_is_too_long, ranks=2)
