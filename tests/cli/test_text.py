import pytest
import torch
from torch import nn

from stepgraph.cli import text
from stepgraph.cli.text import BatchShape, TextBatches, count_bytes, generate, read_text
from stepgraph.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.py").write_bytes(b"bb")
    (tmp_path / "a.txt").write_bytes(b"a")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "c.md").write_bytes(b"ccc")
    (tmp_path / "picture.png").write_bytes(b"xxxx")
    for hidden in (".git", "site-packages"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "d.py").write_bytes(b"dddd")
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")
    return tmp_path


def batches(**changes):
    settings = {"data": torch.arange(200, dtype=torch.uint8), "seed": 3, "rank": 0}
    settings |= {"shape": BatchShape(2, 16, 2)} | changes
    return TextBatches(**settings)


def test_a_file_is_its_bytes(tmp_path):
    path = tmp_path / "no_suffix"
    path.write_bytes(b"\x00\xffhi")
    data = read_text(path)
    assert data.dtype == torch.uint8
    assert data.tolist() == [0, 255, ord("h"), ord("i")]
    assert count_bytes(path) == 4


def test_a_folder_is_its_text_files_in_order(folder):
    assert bytes(read_text(folder).tolist()) == b"abbccc"
    assert count_bytes(folder) == 6


def test_no_more_is_read_than_the_bound(folder, monkeypatch):
    monkeypatch.setattr(text, "MAX_BYTES", 4)
    assert bytes(read_text(folder).tolist()) == b"abbc"
    assert count_bytes(folder) == 4


def test_a_missing_text_is_bad_usage(tmp_path):
    with pytest.raises(UsageError, match="there is no text at '.*nowhere'"):
        read_text(tmp_path / "nowhere")


def test_a_folder_without_text_is_bad_usage(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"xxxx")
    with pytest.raises(UsageError, match=r"no text file below(?s:.*)\.py"):
        read_text(tmp_path)


def test_an_empty_file_is_bad_usage(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(UsageError, match="is empty"):
        read_text(path)
    with pytest.raises(UsageError, match="is empty"):
        BatchShape(2, 16, 2).check_fits(count_bytes(path), path)


def test_a_text_shorter_than_one_batch_says_by_how_much():
    shape = BatchShape(rows=2, seq=16, ranks=2)
    shape.check_fits(64, "notes.txt")
    with pytest.raises(
        UsageError, match="64 bytes are needed, 63 given(?s:.*)2 ranks x 2 rows x 16"
    ):
        shape.check_fits(63, "notes.txt")


def test_a_batch_is_rows_of_the_text():
    batch = batches().batch(1)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (2, 16)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert (batch["input_ids"].diff() == 1).all()


def test_a_step_number_and_a_seed_are_all_a_batch_depends_on():
    fresh, used = batches(), batches()
    for step in range(5):
        used.batch(step)
    assert torch.equal(fresh.batch(7)["input_ids"], used.batch(7)["input_ids"])
    assert not torch.equal(fresh.batch(7)["input_ids"], fresh.batch(8)["input_ids"])
    assert not torch.equal(fresh.batch(7)["input_ids"], batches(seed=4).batch(7)["input_ids"])


def test_ranks_share_the_rows_of_the_same_global_batch():
    whole = batches(shape=BatchShape(4, 16, 1)).batch(5)["input_ids"]
    parts = [batches(rank=rank).batch(5)["input_ids"] for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_every_position_of_the_text_can_be_drawn():
    small = batches(data=torch.arange(18, dtype=torch.uint8))
    assert {o for step in range(50) for o in small.offsets(step)} == {0, 1, 2}


class Alphabet(nn.Module):
    """Says that the next byte is the last one plus one; keeps the longest input that it saw."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))
        self.longest = 0

    def forward(self, input_ids):
        self.longest = max(self.longest, input_ids.shape[1])
        return nn.functional.one_hot(input_ids + 1, 300) * self.scale


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_is_generated_byte_by_byte(temperature):
    model = Alphabet()
    assert generate(model, 5, prompt=b"A", window=3, temperature=temperature) == "BCDEF"
    assert model.longest == 3


def test_bytes_that_are_no_text_are_replaced():
    assert generate(Alphabet(), 2, prompt=b"\xfc", temperature=0) == "\ufffd\ufffd"
