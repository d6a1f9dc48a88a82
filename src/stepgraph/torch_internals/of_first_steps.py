"""Imports what a first step imports of torch's compiler, a second's worth: for who forks ranks later."""

import torch._inductor.compile_fx  # noqa: F401
