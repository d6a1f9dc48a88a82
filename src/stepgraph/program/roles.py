"""What each input and output of a Program is.

A Program is a pure function; its arguments and results are typed so that nobody has to guess which
one is a parameter (principle 3: facts are read, never re-derived).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """A parameter, under the model's own (canonical) name."""

    name: str


@dataclass(frozen=True)
class Buffer:
    """A buffer, under the model's own name."""

    name: str


@dataclass(frozen=True)
class Outside:
    """A tensor that code reads from outside model and batch, under the name that the code has for it."""

    name: str


@dataclass(frozen=True)
class UserInput:
    """Leaf ``index`` of the flattened batch; ``name`` is its path in the batch."""

    index: int
    name: str


@dataclass(frozen=True)
class OptimizerState:
    """State ``key`` of parameter ``owner``, or of several (``owner`` = ``"group0"``)."""

    owner: str
    key: str


@dataclass(frozen=True)
class Scalar:
    """A number of the training step, as a 0-dim float64 tensor: ``group0.lr``."""

    name: str


@dataclass(frozen=True)
class Seed:
    """The run's seed and step, from which every random operation derives its bits."""


@dataclass(frozen=True)
class HostSeed:
    """One number of the run's seed, the step and the micro-batch, on the host: for kernels that draw."""


@dataclass(frozen=True)
class Tangent:
    """The gradient of the loss with respect to itself, before capture fixes it to one."""


@dataclass(frozen=True)
class ResultTangent:
    """What the caller's backward passes in for ``ModuleResult`` ``index``: placed like that."""

    index: int


@dataclass(frozen=True)
class GivenGrad:
    """A parameter's gradient as the caller holds it, for an update that runs by itself."""

    name: str


@dataclass(frozen=True)
class Saved:
    """Value ``index`` of what a forward leaves for its backward: a result of one, an input of the other."""

    index: int


@dataclass(frozen=True)
class Accumulator:
    """A sum over micro-batches: ``grad:<parameter>``, ``loss`` or ``count``."""

    name: str


@dataclass(frozen=True)
class Loss:
    """The loss of one process on the global batch."""


@dataclass(frozen=True)
class UserOutput:
    """Leaf ``index`` of what the loss callable returned, for ``evaluate``."""

    index: int


@dataclass(frozen=True)
class ModuleResult:
    """Leaf ``index`` of what a module returned, as DDP returns it: the rows of this data-parallel rank."""

    index: int


@dataclass(frozen=True)
class Grad:
    """The gradient of a parameter."""

    name: str


@dataclass(frozen=True)
class InputGrad:
    """The gradient of leaf ``index`` of the batch, of a caller that wants it: placed like that."""

    index: int


@dataclass(frozen=True)
class NewParam:
    """The updated parameter."""

    name: str


@dataclass(frozen=True)
class NewBuffer:
    """The buffer after the forward pass wrote it."""

    name: str


@dataclass(frozen=True)
class NewOptimizerState:
    """The updated optimizer state."""

    owner: str
    key: str


@dataclass(frozen=True)
class NewAccumulator:
    """The accumulator after this micro-batch."""

    name: str


Input = (
    Param | Buffer | Outside | UserInput | OptimizerState | Scalar | Seed | HostSeed | Tangent
    | ResultTangent | GivenGrad | Saved | Accumulator
)  # fmt: skip
Output = (
    Loss | UserOutput | ModuleResult | Saved | Grad | InputGrad | NewParam | NewBuffer
    | NewOptimizerState | NewAccumulator
)  # fmt: skip

# What random operations draw from.
SEEDS = (Seed, HostSeed)

# What each call brings along; everything else is state.
BROUGHT = (UserInput, Tangent, ResultTangent, GivenGrad, Saved)


def written_input(output: Output) -> Input | None:
    """The input whose storage an output replaces, or None for a plain result."""
    match output:
        case NewParam(name):
            return Param(name)
        case NewBuffer(name):
            return Buffer(name)
        case NewOptimizerState(owner, key):
            return OptimizerState(owner, key)
        case NewAccumulator(name):
            return Accumulator(name)
    return None


def label(role: Input | Output) -> str:
    """A short text: ``Param(lm_head.weight)``."""
    fields = ".".join(str(v) for v in vars(role).values())
    return f"{type(role).__name__}({fields})" if fields else type(role).__name__
