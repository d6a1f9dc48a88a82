"""Capturing on the host what will run on another kind of device.

``torch.autocast`` casts other operators there: the host keeps fewer in float32. The lists are those of
``aten/src/ATen/autocast_mode.h`` (torch 2.13); a name that a torch does not have is passed over.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.utils as _dynamo_utils
from torch import fx
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx.node import map_aggregate

from stepgraph.torch_internals import host_device, pytree

LOWER = """
    prelu addr addmv mv addbmm chain_matmul linalg_multi_dot linalg_vecdot conv_tbc
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""  # beyond what the host has as well
FLOAT = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
    mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)
# In float32 on the host alone.
AS_THEY_ARE = """
    avg_pool3d binary_cross_entropy grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d polar
    quantile quantile.scalar nanquantile nanquantile.scalar stft stft.center trace view_as_complex cholesky
    cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d
    max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    replication_pad3d mse_loss_ cosine_embedding_loss_ ctc_loss.IntList ctc_loss.Tensor
    multilabel_margin_loss_ fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft
    fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond linalg_cond.p_str
    linalg_matrix_rank linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv
    linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf
    _lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d
    multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh
    linalg_lstsq linalg_inv_ex
"""
KEY = "AutocastCPU"


@contextlib.contextmanager
def as_everywhere() -> Iterator[None]:
    """Within it, nothing of the host's own is captured: no operator of oneDNN.

    What torch would capture of a recurrent network has other names than on a device, and its backward lacks
    what the forward kept (torch 2.13). That a device's autocast would be disabled on the host is no news.
    """
    before = torch._C._get_mkldnn_enabled()  # torch's public switch warns of something else
    torch._C._set_mkldnn_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Disabling autocast")
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def told_of(device_type: str) -> Iterator[None]:
    """Within it, Python code that dynamo runs through is told that the host's tensors are on a device.

    The code of torch itself is told what is. What the graph then says of devices, :func:`enter_on_host`
    takes back.
    """
    if device_type == host_device().type:
        yield
        return
    device = torch.device(device_type, 0)
    answers = {"device": device, f"is_{device_type}": True, f"is_{host_device().type}": False}
    before = {name: vars(TensorVariable).get(f"method_attr_{name}") for name in answers}
    run_node = _dynamo_utils.run_node

    def run_on_host(tracer: Any, node: fx.Node, args: Any, kwargs: Any, module: Any) -> Any:
        args, kwargs = pytree.tree_map(functools.partial(_of_host, device_type), (args, kwargs))
        if node.op == "call_method" and node.target == device_type:
            return args[0]
        return run_node(tracer, node, args, kwargs, module)

    _dynamo_utils.run_node = run_on_host
    for name, answer in answers.items():
        setattr(TensorVariable, f"method_attr_{name}", _answering(name, answer, before[name]))
    try:
        yield
    finally:
        _dynamo_utils.run_node = run_node
        for name, function in before.items():
            if function is None:
                delattr(TensorVariable, f"method_attr_{name}")
            else:
                setattr(TensorVariable, f"method_attr_{name}", function)


def _answering(name: str, answer: Any, before: Callable | None) -> Callable:
    def method_attr(self: Any, tx: Any) -> Any:
        if tx.f_code.co_filename.startswith(torch.__path__[0]):
            return before(self, tx) if before is not None else None
        return VariableTracker.build(tx, answer)

    return method_attr


def _of_host(device_type: str, value: Any) -> Any:
    """The host in place of a device, or of its name."""
    named = isinstance(value, str) and value.split(":")[0] == device_type
    if named or (isinstance(value, torch.device) and value.type == device_type):
        return host_device() if isinstance(value, torch.device) else host_device().type
    return value


@contextlib.contextmanager
def casts_of(device_type: str) -> Iterator[None]:
    """Within it, autocast on the host casts as it does on another kind of device."""
    if device_type == host_device().type:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            _override(library)
        yield
    finally:
        library._destroy()


def _override(library: torch.library.Library) -> None:
    for names, make in ((LOWER, _lower), (FLOAT, _float), (WIDEST, _widest)):
        for op in filter(None, map(_find, names.split())):
            library.impl(op, make(op), KEY, allow_override=True)
    for op in filter(None, map(_find, AS_THEY_ARE.split())):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), KEY):
            library.impl(op, torch.library.fallthrough_kernel, KEY, allow_override=True)


def enter_on_host(module: fx.GraphModule, device_type: str) -> None:
    """A graph of dynamo's names the host in place of a device, and so do those inside it."""
    host = host_device().type
    if device_type == host:
        return
    for graph in (m for m in module.modules() if isinstance(m, fx.GraphModule)):
        for node in graph.graph.nodes:
            if node.target is torch.amp.autocast_mode._enter_autocast:
                kind, dtype, *others = node.args
                if kind in (host, device_type):
                    dtype = dtype or torch.get_autocast_dtype(device_type)
                    node.args = (host, dtype, *others)
            elif node.op == "call_method" and node.target == device_type:
                node.target, node.args, node.kwargs = host, node.args[:1], {}
            else:
                of_host = functools.partial(_of_host, device_type)
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), of_host)
        graph.recompile()


def _find(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _casting(op: Any, choose: Callable[[list[torch.Tensor]], torch.dtype | None]) -> Callable:
    """``op`` below autocast, its floating-point arguments in the type that is chosen for them."""
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if _is_cast(x)]
        dtype = choose(leaves)
        cast = functools.partial(_in, dtype) if dtype is not None else lambda x: x
        args, kwargs = pytree.tree_map(cast, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(*args, **kwargs)

    return kernel


def _is_cast(value: Any) -> bool:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return floating and value.dtype != torch.float64


def _in(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if _is_cast(value) else value


def _lower(op: Any) -> Callable:
    return _casting(op, lambda tensors: torch.get_autocast_dtype(host_device().type))


def _float(op: Any) -> Callable:
    return _casting(op, lambda tensors: torch.float32)


def _widest(op: Any) -> Callable:
    def choose(tensors: list[torch.Tensor]) -> torch.dtype | None:
        wide = any(t.dtype == torch.float32 for t in tensors)
        return torch.float32 if wide else None

    return _casting(op, choose)
