"""Tensors of cuda:0 whose data are CPU tensors that only this file can reach; every copy between host and device is counted."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pretend_cuda.graph import Tape, tensors_of
from pretend_cuda.ledger import LEDGER, READ, site
from pretend_cuda.timeline import TIMELINE

aten = torch.ops.aten
CUDA, ANY_CUDA = torch.device("cuda:0"), torch.device("cuda")
CPU = torch.device("cpu")

# The result's size, or the result itself, is on the host.
READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten._linalg_check_errors.default,
}
INDEXED = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._unsafe_index.Tensor,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
}
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
NOT_HERE = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."


def waited(what: str, kind: str = READ) -> None:
    """The host waits for the device: counted, refused inside a capture and, but for plain waits, in the mode `error`."""
    if Tape.replaying:
        return
    if LEDGER.sync_mode == "error" and kind == READ:
        raise RuntimeError(f"called a synchronizing CUDA operation ({what} at {site()})")
    _not_in_capture(what)
    (LEDGER.reads if kind == READ else LEDGER.synchronized)[what, site()] += 1


def uploaded(blocking: bool) -> None:
    """A copy from the host: a capture may contain none, not from pinned memory either, which its owner may change before a replay."""
    if LEDGER.sync_mode == "error" and blocking:
        raise RuntimeError(f"called a synchronizing CUDA operation (a blocking copy at {site()})")
    _not_in_capture("a copy from the host")
    LEDGER.uploads[blocking, site()] += 1


def _not_in_capture(what: str) -> None:
    if Tape.current is not None:
        LEDGER.failed_captures.append(f"{what} at {site()}")
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what} at {site()})")


class DeviceTensor(torch.Tensor):
    """A tensor of cuda:0."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=CUDA
        )

    def __init__(self, host: torch.Tensor) -> None:
        assert host.device.type == "cpu"
        assert not isinstance(host, DeviceTensor)
        self._host = host.detach()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> "DeviceTensor":
        return DeviceTensor(inner["_host"])

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(NOT_HERE)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(NOT_HERE)

    def data_ptr(self) -> int:
        return self._host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._host.untyped_storage()

    def storage(self) -> Any:
        return self._host.untyped_storage()

    def tolist(self) -> Any:
        waited("tolist")
        return self._host.tolist()

    def dequantize(self) -> "DeviceTensor":  # type: ignore[override]
        return self  # Code that asks a weight's class takes this one for a packed format.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._host.__reduce_ex__(protocol)  # In a file it is a tensor like any other, to be loaded onto the CPU.

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        if id(self) not in memo:
            with torch.no_grad():
                twin = DeviceTensor(self._host.clone())
            twin.requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                twin._is_param = True  # type: ignore[attr-defined]
            memo[id(self)] = twin
        return memo[id(self)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and not torch.is_grad_enabled():
            assert all(isinstance(tensor, DeviceTensor) for tensor in tensors_of((args, kwargs))), "mixed devices"
            return _run(_attention, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func == SET_DATA:
                args[0]._host = args[1]._host
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class DeviceFactories(TorchDispatchMode):
    """Factory functions with cuda:0 make tensors of this device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class DeviceArguments(TorchFunctionMode):
    """Handle what does not reach the dispatcher: `cuda` for `cuda:0`, `torch.tensor(..., device=)`, `.cuda()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _is_cuda(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": CPU}).to(CUDA)
        if func is torch.Tensor.cuda:
            return args[0].to(CUDA)
        args = tuple(_with_index(value) for value in args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _with_index(kwargs["device"])}
        return func(*args, **kwargs)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nested lists, tuples and dictionaries of other leaves."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: mapped(function, part) for name, part in tree.items()} if tree else tree
    if not isinstance(tree, list | tuple):
        return tree
    # Written out for leaves: this is called twice a kernel.
    parts = [
        function(part)
        if isinstance(part, torch.Tensor)
        else mapped(function, part)
        if isinstance(part, list | tuple | dict)
        else part
        for part in tree
    ]
    if type(tree) in (list, tuple):
        return type(tree)(parts)
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def _with_index(value: Any) -> Any:
    return CUDA if value.__class__ in (str, torch.device) and value in ("cuda", ANY_CUDA) else value


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _host(value: Any) -> Any:
    return value._host if isinstance(value, DeviceTensor) else value


def _on_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor) else value


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One kernel: on the host's copies, onto the tape inside a capture."""
    args, kwargs = mapped(_host, args), mapped(_host, kwargs)
    LEDGER.kernels += not Tape.replaying and Tape.current is None
    out = func(*args, **kwargs) if Tape.current is None else Tape.current.record(func, args, kwargs)
    return mapped(_on_device, out)


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = tensors_of((args, kwargs))
    ours = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
    if func is aten._to_copy.default:
        return _moved(func, args[0], kwargs)
    if func is aten.copy_.default and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
        return _copied(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
    if not ours:
        if not _is_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        return _run(func, args, _without_place(kwargs))
    if func in READS:
        waited(str(func))
    if func in INDEXED:
        args = _indexed(args)
        tensors = tensors_of((args, kwargs))
    if "device" in kwargs:
        if kwargs["device"] is not None and not _is_cuda(kwargs["device"]):  # new_zeros(device="cpu")
            return func(*mapped(_host, args), **kwargs)
        return _run(func, args, _without_place(kwargs))
    _refuse_mixture(func, args, tensors)
    if func is aten.where.self and not all(isinstance(tensor, DeviceTensor) for tensor in tensors):
        uploaded(True)  # This one copies a number to the device; other kernels read it.
    if func is aten._local_scalar_dense.default:
        return func(args[0]._host)
    if func is aten.histc.default and not args[0].dtype.is_floating_point:  # CUDA has it for integers, a CPU has not.
        return _run(lambda x, *rest: func(x.float(), *rest).to(x.dtype), args, kwargs)
    if _is_view(func):
        out = mapped(_on_device, func(*mapped(_host, args), **mapped(_host, kwargs)))
    else:
        out = _run(func, args, kwargs)
    return _written_is_given(func, args, kwargs, out)


def _without_place(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "pin_memory"} | {"device": CPU}


def _moved(func: Any, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    device, is_ours = kwargs.get("device"), isinstance(source, DeviceTensor)
    to_cuda = is_ours if device is None else _is_cuda(device)
    if not is_ours and not to_cuda:
        return func(source, **kwargs)
    if is_ours and to_cuda:
        return _run(func, (source,), _without_place(kwargs))
    if is_ours:
        values = func(_host(source), **_without_place(kwargs))
        if not kwargs.get("non_blocking", False):
            waited("copy to the host")
            return values
        _not_in_capture("a copy to the host")
        LEDGER.downloads[site()] += 1
        return TIMELINE.send(values)
    uploaded(not kwargs.get("non_blocking", False))
    return DeviceTensor(func(source, **_without_place(kwargs)).clone())


def _copied(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    if isinstance(destination, DeviceTensor):
        uploaded(not non_blocking)
    else:  # Into memory that is not pinned.
        waited("copy to the host")
    _host(destination).copy_(_host(source))
    return destination


def _indexed(args: Any) -> Any:
    """Indices on the host are copied to the device, masks on the device are counted on the host."""
    source, indices, *rest = args
    found = []
    for index in indices:
        if isinstance(index, DeviceTensor):
            if not isinstance(source, DeviceTensor):
                raise RuntimeError(f"indices should be on the CPU like the indexed tensor ({site()})")
            if index.dtype in (torch.bool, torch.uint8):
                waited("a mask as index")
        elif index is not None:
            uploaded(True)
        found.append(_on_device(index))
    return (source, found, *rest)


def _refuse_mixture(func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """As kernels do: a CPU tensor is welcome as a number that is read, and as nothing else."""
    for tensor in tensors:
        if isinstance(tensor, DeviceTensor):
            continue
        if tensor.dim() > 0 or (func._schema.is_mutable and args and args[0] is tensor):
            raise RuntimeError(f"Expected all tensors to be on the same device, cuda:0 and cpu at {site()} ({func})")


@functools.cache
def _is_view(func: Any) -> bool:
    if func in (aten.detach.default, aten.lift_fresh.default, aten.alias.default):
        return True
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


@functools.cache
def _returned(func: Any) -> tuple[tuple[int, str] | None, ...]:
    """For each result the argument (place, name) that it is, written in place; () for a call that writes nothing."""
    schema = func._schema
    if not schema.is_mutable:
        return ()

    def given(result: Any) -> tuple[int, str] | None:
        if result.alias_info is None or not result.alias_info.is_write:
            return None
        for number, argument in enumerate(schema.arguments):
            own = argument.alias_info
            if own is not None and own.is_write and own.before_set & result.alias_info.before_set:
                return number, argument.name
        return None

    return tuple(given(result) for result in schema.returns)


def _written_is_given(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """What a call writes in place it returns as the object it got."""
    returned = _returned(func)
    if not returned:
        return out
    values = [out] if len(returned) == 1 else out
    found = [
        value if given is None else kwargs[given[1]] if given[1] in kwargs else args[given[0]]
        for given, value in zip(returned, values, strict=True)
    ]
    return found[0] if len(returned) == 1 else type(out)(found)
