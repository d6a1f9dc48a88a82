"""A small Llama, its data and its plain PyTorch reference, for the end-to-end tests."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, WIDTH, TOKENS, ROWS = 101, 32, 12, 16  # 101 rows: uneven on 2 and 4 ranks
STEPS, RATE, CLIP = 10, 1e-3, 0.5


def tiny_llama(
    layers: int = 2, checkpoint: bool = False, vocabulary: int = VOCABULARY
) -> LlamaForCausalLM:
    """Two layers, grouped-query attention, tied embeddings; the same weights every time."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=vocabulary,
            tie_word_embeddings=True,
        )
    )
    if checkpoint:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def llama_batch(seed: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Tokens whose ignored labels and padding differ from row to row, so from rank to rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator)
    labels, mask = ids.clone(), torch.ones(rows, TOKENS, dtype=torch.long)
    for row in range(rows):
        labels[row, : (row * 5) % TOKENS] = -100
        if row % 3 == 0:
            mask[row, TOKENS - 3 :] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.AdamW(parameters, lr=RATE)


@functools.cache
def reference(
    steps: int = STEPS, vocabulary: int = VOCABULARY, rows: int = ROWS, layers: int = 2
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final parameters of plain PyTorch on the whole batch, one process."""
    model = tiny_llama(layers, vocabulary=vocabulary)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**llama_batch(step, rows)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


# Losses are sums of rows * tokens (about 2^8) terms of size ln(vocabulary): sqrt(2^8) eps relative,
# and as much again for what the sums before them are off: 64 eps.
LOSS_TOLERANCE = 64 * torch.finfo(torch.float32).eps
# Adam moves an entry by at most the learning rate a step, and an entry whose gradient is off by a
# fraction f moves by f of that. Gradients are off by about 256 eps of their tensor's largest entry
# (see equivalence.check.tolerance), so f <= 1 % for every entry above 1/300 of the largest.
PARAMETER_TOLERANCE = 0.01 * STEPS * RATE


def compare(
    losses: list[float],
    parameters: dict[str, torch.Tensor],
    vocabulary: int = VOCABULARY,
    rows: int = ROWS,
    layers: int = 2,
) -> None:
    """Asserts that a run equals the reference."""
    expected_losses, expected = reference(len(losses), vocabulary, rows, layers)
    for step, (loss, wanted) in enumerate(zip(losses, expected_losses, strict=True)):
        assert abs(loss - wanted) <= LOSS_TOLERANCE * abs(wanted), (step, loss, wanted)
    assert parameters.keys() == expected.keys()
    for name, value in parameters.items():
        difference = (value - expected[name]).abs().max().item()
        assert difference <= PARAMETER_TOLERANCE, (name, difference)
