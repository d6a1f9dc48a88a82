"""What a script holds: Engine, parallelize, plan, check, the backend of torch.compile."""
