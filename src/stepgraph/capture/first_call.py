"""What a library sets up at a module's first call, under a lock that dynamo cannot enter: set up before.

transformers' models put forward hooks into themselves when they are first asked for hidden states or
attentions, as the language model of images is by its head, and a segmentation by its decoder. Once they are
there, a forward is captured whole.
"""

import sys

from torch import nn

_HOOKS = "transformers.utils.output_capturing"
_INSTALL, _INSTALLED = "maybe_install_capturing_hooks", "_output_capturing_hooks_installed"


def set_up(model: nn.Module, where: str | None) -> bool:
    """Does what the first call of a model would have done at a line where it could not be captured.

    Args:
        where: the line.

    Returns:
        whether anything was done.
    """
    library = sys.modules.get(_HOOKS)
    install = getattr(library, _INSTALL, None)
    if install is None or not (where or "").startswith(str(library.__file__)):
        return False
    done = False
    for module in model.modules():
        can_record = getattr(module, "_can_record_outputs", None) is not None
        # It goes into the models inside of it, too, and would do so twice.
        if can_record and not any(getattr(part, _INSTALLED, False) for part in module.modules()):
            install(module)
            done = True
    return done
