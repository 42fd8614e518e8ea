"""Models and tokenizers from a directory, a hub id or `embedded`, and what tells them apart later."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from distill.models.quantized import quantization_of, stored_parts
from distill.models.text_model import auto_class, text_only
from speculative.errors import UserError

EMBEDDED = "embedded"
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
MOST_LAYERS, WEIGHTS_A_BYTE = 1024, 8  # one bit a weight
_FOLDERS = re.compile(r"""(?:(?<=\\n)|(?<![\w.:/~)-]))~?(?:/[^\s/'",;:]+)*/(?=[^\s/'",;:])""")


def resolve(path: str) -> str:
    """`embedded` -> the folder of the target shipped with us; anything else as it is."""
    if path == EMBEDDED:
        return str(EMBEDDED_FOLDER)
    return str(Path(path).expanduser()) if path.startswith("~") else path


def public_name(path: str) -> str:
    """A model's name without the folders of this machine: a hub id or `embedded` as it is, the last part of a directory."""
    place = Path(resolve(path)).resolve()
    if place == EMBEDDED_FOLDER:
        return EMBEDDED
    return place.name if place.is_dir() or Path(path).is_absolute() else path


def without_folders(text: str) -> str:
    """JSON that is to be published: of each absolute path of this machine only the last part."""
    return _FOLDERS.sub("", text)


def reason_of(error: BaseException) -> str:
    """The first line of an error; transformers' config validation has its reason on the second."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if isinstance(error, StrictDataclassError) else 1])


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """What transformers and peft say against a config or weights, as a UserError of one line that begins with ``what``."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"{what}: {reason_of(error)}") from error


def find_model(what: str, path: str, needed: str = "config.json") -> bool:
    """Whether a path is of this machine and not of the hub.

    Raises:
        UserError: it is, and no folder with the `needed` file is there.
    """
    local = resolve(path)
    looks_local = local.startswith((".", "/", "~")) or Path(local).exists()
    if looks_local and not (Path(local) / needed).exists():
        raise UserError(
            f"{what} {path!r}: no {needed or 'folder'} there; give a Hugging Face model directory or a hub id"
        )
    return looks_local


def load_pretrained(what: str, path: str, load: Any, **options: Any) -> Any:
    """Calls a `from_pretrained` and turns its ways of failing into one line."""
    local = resolve(path)
    looks_local = find_model(what, path, "" if what == "tokenizer" else "config.json")
    # A bar is for downloads: the ones for reading local weights break our own progress lines.
    (disable_progress_bar if looks_local else enable_progress_bar)()
    try:
        return load(local, **options)
    except (
        BaseException
    ) as error:  # The tokenizers library raises nothing more exact, and a panic in it is no Exception.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = reason_of(error)
        if looks_local:
            raise UserError(f"{what} {path!r}: cannot be loaded: {reason}") from error
        raise UserError(
            f"{what} {path!r}: not a local directory, and the hub could not give it ({reason}); offline, download it elsewhere "
            f"with `hf download {path}`, copy the folder here and give its path"
        ) from error


def dtype_of(name: str, device: torch.device) -> torch.dtype | str:
    """Config name -> dtype. `auto` is float32 on a CPU, where half precision saves no time, and as saved elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)


def load_model(
    what: str,
    path: str,
    *,
    dtype: torch.dtype | str = torch.float32,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
    device_map: str | None = None,
    change: Callable[[PretrainedConfig], None] | None = None,
) -> PreTrainedModel:
    """A causal LM from a directory, hub id or `embedded`, in eval mode; of a multimodal one the text model. ``what`` is its name in errors.

    Quantised weights stay as they are saved, whatever the ``dtype``. ``device``: where it goes; null = the CPU. ``device_map``: its
    layers spread over all devices instead, in accelerate's way of this name. ``change``: what is to be another in its config
    before it is made.

    Raises:
        UserError: not there, not loadable (a quantisation whose library is not installed), not whole, hub not reachable, not
            enough room on the devices.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_pretrained(what, path, AutoConfig.from_pretrained, **options)
    options |= {"dtype": dtype, "output_loading_info": True}
    if change is not None:
        change(config)
        options["config"] = config
    if quantization_of(config) is not None:
        options |= {"dtype": "auto", "device_map": {"": device or torch.device("cpu")}}
    if device_map is not None:
        options["device_map"] = device_map
    load_pretrained(what, path, lambda local, **_: _refuse_oversized(Path(local), config, trust_remote_code))
    loaded, loading = load_pretrained(what, path, auto_class(config).from_pretrained, **options)
    # The library fills missing weights with random numbers and only logs it.
    if absent := sorted(loading["missing_keys"]) + sorted(str(key) for key in loading["mismatched_keys"]):
        raise UserError(f"{what} {path!r}: weight {absent[0]} is missing or of another shape; give a whole model")
    model = text_only(loaded).eval()
    _refuse_offloaded(what, path, model)
    return model if device is None or "device_map" in options else model.to(device)


def _refuse_oversized(folder: Path, config: Any, trust_remote_code: bool) -> None:
    """Raises ValueError where a config claims more weights than its files may hold: all of them would be made before they are missed."""
    if not folder.is_dir():
        return
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if layers > MOST_LAYERS:
        raise ValueError(f"config.json claims {layers} layers, more than {MOST_LAYERS}")
    with init_empty_weights():
        made = auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    claimed = sum(weight.numel() for weight in made.parameters())
    if claimed > WEIGHTS_A_BYTE * held:
        raise ValueError(f"config.json claims {claimed:,} weights, and the files hold {held:,} bytes")


def _refuse_offloaded(what: str, path: str, model: Any) -> None:
    """Layers that accelerate leaves in memory or on disk would be sent to a GPU for every token."""
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise UserError(
            f"{what} {path!r}: does not fit on the {torch.cuda.device_count()} GPUs here, some layers would stay in memory or on disk; "
            "give more GPUs, quantised weights, or target.endpoint"
        )


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """A tokenizer from a directory, hub id or `embedded`.

    Raises:
        UserError: not there, not loadable, hub not reachable.
    """
    return load_pretrained(
        "tokenizer", path, AutoTokenizer.from_pretrained, revision=revision, trust_remote_code=trust_remote_code
    )


def saved_dtype(config: Any) -> torch.dtype:
    """The dtype a model is saved, and by default served, in. None in a config means float32 in this library."""
    return getattr(config.get_text_config(), "dtype", None) or torch.float32


def model_fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits of SHA-256 over the names, shapes and values of all weights.

    Values enter as float32, so the same weights loaded in another precision that holds them exactly agree. Each tensor gives
    at most 4096 evenly spread values: enough to tell two models apart, quick on a large one.
    """
    digest = hashlib.sha256()
    for weight, kept in sorted(model.state_dict().items()):
        for name, tensor in stored_parts(weight, kept):
            flat = tensor.reshape(-1)
            step = max(1, flat.numel() // 4096)
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits of SHA-256 over every token string with its id, the special ones marked."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    content = json.dumps([entries, sorted(tokenizer.all_special_ids)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
