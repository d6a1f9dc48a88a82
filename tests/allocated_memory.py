"""What a step holds at its peak by the host's allocator: compiled code tells nobody else."""

import torch
from torch.profiler import ProfilerActivity, profile


def bytes_between_steps(model, optimizer, batch):
    """Bytes of parameters, buffers, the optimizer's state and the batch."""
    states = optimizer.state_dict()["state"].values()
    state = [t for one in states for t in one.values() if isinstance(t, torch.Tensor)]
    held = [*model.parameters(), *model.buffers(), *state, *batch.values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in held)


def allocated_peak(run):
    """Most bytes above those at its start that the allocator has given out at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    alive = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most
