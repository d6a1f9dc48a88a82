"""Which operations draw from a generator."""

from torch import fx

from stepgraph.operators import table as operators


def is_random(node: fx.Node) -> bool:
    """Whether a generator decides its result."""
    if not operators.of(node.target).draws:
        return False
    # Attention kernels are tagged random whether or not they drop anything.
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    arguments = {argument.name: argument.default_value for argument in schema}
    arguments |= dict(zip((argument.name for argument in schema), node.args, strict=False))
    arguments |= node.kwargs
    return "dropout_p" not in arguments or arguments["dropout_p"] != 0.0
