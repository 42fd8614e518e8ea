"""Load models and tokenizers from a directory, a hub id or `embedded`, and fingerprint them."""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from httpx2 import HTTPError
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, find_adapter_config_file
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from data.hub import hub_id, reach_hub
from distill.config.layout import find_student, near_path
from distill.models.files.adapter import with_adapter
from distill.models.files.complete import HEAD_CLASSES, REPORTS, head_error, refuse_incomplete
from distill.models.files.gguf import GGUF, read_gguf, split_as_named
from distill.models.library_state import keep_gguf_readers, loops_as_phases
from distill.models.quantized import quantization_of, stored_parts, without_quantization
from distill.models.text_model import auto_class, text_only, without_weights
from distill.models.vocabulary import refuse_two_heads
from speculative.errors import UserError
from speculative.progress import each, phase

EMBEDDED, ADAPTER_FILE = "embedded", "adapter_config.json"
TOKENIZER_FILE = "tokenizer_config.json"
_adapter_config_on_hub = functools.cache(find_adapter_config_file)  # asked several times in a start
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
MOST_LAYERS, WEIGHTS_A_BYTE = 1024, 8  # one bit per weight
# Keys of a config that change no logit: how it was written, and dtypes, which are recorded apart.
INERT = ("transformers_version", "_name_or_path", "_commit_hash", "use_cache", "dtype", "torch_dtype")
HASHED = 1 << 24  # values that are hashed at once, to bound memory

# A string or a value that begins with a path may have blanks in it; inside a sentence a path ends at a blank.
_FOLDERS = re.compile(
    r"""(?<=["=])~?(?:/(?:[^/'",;:=\\]|\\u)+)*/(?=[^\s/'",;:])|"""
    r"""(?:(?<=\\n)|(?<![\w.:/~)-]))~?(?:/[^\s/'",;:]+)*/(?=[^\s/'",;:])"""
)


def resolve(path: str) -> str:
    """Return the directory of the shipped target for `embedded`; other paths are unchanged."""
    if path == EMBEDDED:
        return str(EMBEDDED_FOLDER)
    return os.path.expanduser(path)


def public_name(path: str) -> str:
    """Return a model's name without local directories: a hub id or `embedded` unchanged, or the last part of a path."""
    place = Path(resolve(path)).resolve()
    if place == EMBEDDED_FOLDER:
        return EMBEDDED
    return hub_id(str(place)) or (path if hub_id(path) else place.name)


def without_folders(text: str) -> str:
    """Shorten each absolute path in JSON text to its last part, so that the text can be published."""
    return _FOLDERS.sub("", text)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error; transformers' config validation has its reason on the second line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if isinstance(error, StrictDataclassError) else 1])


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn errors of transformers and peft into a UserError of one line that begins with ``what``. Their checks of a config raise any."""
    of_values = (ValueError, TypeError, KeyError, ArithmeticError, AssertionError, StrictDataclassError)
    try:
        yield
    except UserError:
        raise
    except (*of_values, OSError, RuntimeError, HTTPError) as error:
        raise UserError(f"{what}: {reason_of(error)}") from error


def find_model(what: str, path: str, needed: str = "config.json") -> bool:
    """Whether a path is local and not a hub id; UserError for a local one without a directory that has the `needed` file."""
    local = resolve(path)
    looks_local = Path(local).exists() or hub_id(local) is None
    needed = "" if local.endswith(GGUF) else needed
    if looks_local and not any((Path(local) / name).exists() for name in (needed, ADAPTER_FILE)):
        inside = find_student(local)
        fix = "give a model directory or a hub id" if inside == local else f"the draft of this run is {inside}"
        if "/" in local and Path(owner := local.partition("/")[0] or "/").is_dir() and owner not in ("/", ".", ".."):
            fix += f" ({owner}/ is a folder here; if you mean the hub's model, first run `hf download {local}`)"
        raise UserError(f"{what} {path!r}: no {needed or 'directory'} there; {fix}{near_path(local)}")
    return looks_local


def load_pretrained(what: str, path: str, load: Any, **options: Any) -> Any:
    """Call a `from_pretrained` and turn every failure into a UserError of one line."""
    local = resolve(path)
    looks_local = find_model(what, path, "" if what == "tokenizer" else "config.json")
    if local.endswith(GGUF):
        options["gguf_file"], local = Path(local).name, str(Path(local).parent)
        keep_gguf_readers()
    if not looks_local:
        reach_hub(constants.ENDPOINT)
    # Bars are for downloads; those for local weights would break our own progress lines.
    (disable_progress_bar if looks_local else enable_progress_bar)()
    REPORTS.reason = REPORTS.UNSEEN
    try:
        return load(local, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    # The tokenizers library raises nothing more specific, and its panics are not Exceptions.
    except BaseException as error:
        reason = REPORTS.reason if "above report" in str(error) else reason_of(error)
        if "Padding_idx" in reason:
            reason = (
                "config.json: pad_token_id has no row in the embedding; set it to an id below vocab_size, or to null"
            )
        if looks_local:
            raise UserError(f"{what} {path!r}: cannot be loaded: {reason}") from error
        raise UserError(
            f"{what} {path!r}: not a local directory, and the hub did not deliver it ({reason}); if offline, download it elsewhere "
            f"with `hf download {path}`, copy the directory here and give its path{near_path(local)}"
        ) from error


def dtype_of(name: str, device: torch.device) -> torch.dtype | str:
    """Return the dtype of a config name. `auto` is float32 on a CPU, where half precision saves no time, else as saved."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)


def read_config(
    what: str, path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Read a model's config, or that of an adapter's base. UserError: not found or not readable, or it describes a draft head."""
    if (base := base_of_adapter(path, revision, what)) is not None:
        return read_config(base.what, base.path, revision=base.revision, trust_remote_code=trust_remote_code)
    values = {} if path.endswith(GGUF) else config_values(what, path, revision)
    names = [*(values.get("architectures") or ()), values.get("speculators_model_type"), values.get("model_type")]
    head = next((name for name in names if isinstance(name, str) and HEAD_CLASSES.search(name)), None)
    if head is not None or "speculators_config" in values:
        raise head_error(what, path, f"config.json: {head or 'speculators_config'}")
    return load_pretrained(
        what, path, AutoConfig.from_pretrained, revision=revision, trust_remote_code=trust_remote_code
    )


def config_values(what: str, path: str, revision: str | None = None) -> dict[str, Any]:
    """Return the entries of config.json, of an adapter those of its base. UserError: not found or not readable."""
    if (base := base_of_adapter(path, revision, what)) is not None:
        return config_values(base.what, base.path, base.revision)
    return load_pretrained(what, path, PretrainedConfig.get_config_dict, revision=revision)[0]


def load_model(
    what: str,
    path: str,
    *,
    dtype: torch.dtype | str = torch.float32,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Load a causal LM from a directory, hub id, GGUF file or `embedded`, in eval mode; of a multimodal model the text model.

    A peft adapter is merged into its base. Quantised weights stay as saved, whatever the ``dtype``; those of a GGUF file are
    dequantised. ``what``: the model's name in errors.
    ``device``: None means the CPU. ``device_map``: spread its layers over all devices instead, by this map of accelerate.

    Raises UserError: not found, not loadable (such as a quantisation without its library), weights that are missing or not used, hub not
    reachable, or not enough memory on the devices.
    """
    if (base := base_of_adapter(path, revision, what)) is not None:
        whole = load_model(
            base.what,
            base.path,
            dtype=dtype,
            revision=base.revision,
            trust_remote_code=trust_remote_code,
            device=device,
            device_map=device_map,
        )
        with refusing(f"{what} {path!r}: the adapter does not fit its base {base.path}"):
            return with_adapter(whole, resolve(path), revision)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = read_config(what, path, **options)
    # Other shapes are refused below, with the name of the weight.
    options |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if path.endswith(GGUF):
        options["quantization_config"] = GgufConfig(dequantize=True)
    elif quantization_of(config) is not None:
        options |= {"dtype": "auto", "device_map": {"": device or torch.device("cpu")}}
    if device_map is not None:
        options["device_map"] = device_map
    load_pretrained(what, path, lambda local, **_: _refuse_oversized(Path(local), config, trust_remote_code))
    # The hub draws a bar for each file on a terminal.
    with phase(f"loading {path}", show=find_model(what, path) or not sys.stderr.isatty()):
        loops_as_phases()
        loaded, loading = load_pretrained(what, path, auto_class(config).from_pretrained, **options)
    refuse_incomplete(what, path, type(loaded).__name__, config, loading)
    refuse_two_heads(f"{what} {path!r}", loaded)
    model = text_only(loaded).eval()
    if path.endswith(GGUF):
        without_quantization(model.config)
        _scale_rotation(gguf_path(what, path), model)
    _refuse_offloaded(what, path, model)
    return model if device is None or "device_map" in options else model.to(device)


class AdapterBase(NamedTuple):
    """The model that a peft adapter was trained on. `what`: its name in errors."""

    path: str
    revision: str | None
    what: str


def base_of_adapter(path: str | Path, revision: str | None = None, what: str = "adapter") -> AdapterBase | None:
    """Return the base of a peft adapter (directory or hub id); None for any other model; UserError if its config has no base."""
    place = resolve(str(path))
    if place.endswith(GGUF):
        return None
    if not find_model(what, place, "" if what in ("tokenizer", "adapter") else "config.json"):
        place = os.path.dirname(load_pretrained(what, place, _adapter_config_on_hub, revision=revision) or "")
    adapter_file = Path(place) / ADAPTER_FILE
    if not place or not adapter_file.is_file():
        return None
    from speculative.measure.record import (
        Record,  # late: pydantic may be missing where a GPU is, and only adapters need it
    )

    record = Record.read(adapter_file, "save the adapter again").record()
    base = record.get("base_model_name_or_path")
    if not (isinstance(base, str) and base):
        raise UserError(f"{adapter_file}: base_model_name_or_path is empty; write the base's directory or hub id there")
    # A moved run keeps its base at the same path relative to the adapter. A directory of that name in the working directory is another one.
    beside = os.path.join(place, base)
    if os.path.isdir(beside) and os.path.samefile(beside, place):
        raise UserError(
            f"{adapter_file}: base_model_name_or_path is the adapter itself; write the base's directory or hub id there"
        )
    what = f"{what} {str(path)!r}: its base ({ADAPTER_FILE}: base_model_name_or_path)"
    return AdapterBase(beside if os.path.isdir(beside) else base, record.get("revision"), what)


def gguf_path(what: str, path: str) -> Path:
    """Where a GGUF file is on this machine; a hub's is downloaded. Raises UserError as `load_model`."""
    return Path(load_pretrained(what, path, lambda place, gguf_file: cached_file(place, gguf_file)))


def _scale_rotation(path: Path, model: Any) -> None:
    """Divide rotary frequencies by the factors of a GGUF file, Llama 3.1's rope scaling: transformers leaves them out."""
    from gguf import GGUFReader  # An extra; transformers has asked for it by now.

    factors = next((one.data for one in GGUFReader(path).tensors if one.name == "rope_freqs.weight"), None)
    for module in model.modules() if factors is not None else ():
        if "inv_freq" in getattr(module, "_buffers", {}):
            module.inv_freq /= torch.tensor(factors, device=module.inv_freq.device)


def _refuse_oversized(folder: Path, config: Any, trust_remote_code: bool) -> None:
    """Raise ValueError if a config claims more weights than its files can hold; loading would allocate all of them first."""
    if not folder.is_dir():
        return
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if layers > MOST_LAYERS:
        raise ValueError(f"config.json claims {layers} layers, more than {MOST_LAYERS}")
    claimed = sum(weight.numel() for weight in without_weights(config, trust_remote_code).parameters())
    if claimed > WEIGHTS_A_BYTE * held:
        raise ValueError(f"config.json claims {claimed:,} weights, and the files hold {held:,} bytes")


def _refuse_offloaded(what: str, path: str, model: Any) -> None:
    """Raise UserError if accelerate left layers in memory or on disk; they would move to a GPU for every token."""
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise UserError(
            f"{what} {path!r}: does not fit on the {torch.cuda.device_count()} GPUs here, so some layers would stay in memory or on disk; "
            "give more GPUs, quantised weights, or target.endpoint with weights: server"
        )


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a directory, hub id or `embedded`; UserError if it cannot be loaded or the hub not reached.

    An adapter without one has that of its base.
    """
    base = base_of_adapter(path, revision, "tokenizer")
    if (
        base is not None
        and cached_file(resolve(path), TOKENIZER_FILE, revision=revision, _raise_exceptions_for_missing_entries=False)
        is None
    ):
        return load_tokenizer(base.path, revision=base.revision, trust_remote_code=trust_remote_code)
    tokenizer = load_pretrained(
        "tokenizer", path, AutoTokenizer.from_pretrained, revision=revision, trust_remote_code=trust_remote_code
    )
    if path.endswith(GGUF):
        split_as_named(tokenizer, read_gguf(gguf_path("tokenizer", path))[0].get("tokenizer.ggml.pre"))
    return tokenizer


def saved_dtype(config: Any) -> torch.dtype:
    """Return the dtype in which a model is saved and by default served. None in a config means float32 in transformers."""
    return getattr(config.get_text_config(), "dtype", None) or torch.float32


def model_files(path: str, revision: str | None = None) -> list[Path]:
    """Return every file that `from_pretrained` may read, of a directory or a hub's snapshot, and of an adapter's base."""
    base, place = base_of_adapter(path, revision), Path(resolve(path))
    if not place.exists():
        name = place.name if path.endswith(GGUF) else ""
        with contextlib.suppress(OSError, ValueError):  # not on this machine yet
            place = Path(
                snapshot_download(str(place.parent if name else place), revision=revision, local_files_only=True), name
            )
    # Below the directory itself: further chat templates, and code.
    inside = [*place.glob("*"), *place.glob("*/*.jinja"), *place.glob("*/*.py")]
    files = [place] if place.is_file() else [file for file in sorted(inside) if file.is_file() and file.name[0] != "."]
    return files + (model_files(base.path, base.revision) if base else [])


def has_weights(path: str) -> bool:
    """Whether a directory has files of weights; a GGUF file and a hub id count as having some."""
    return not Path(resolve(path)).is_dir() or any(
        file.suffix in (".safetensors", ".bin") for file in model_files(path)
    )


def source_fingerprint(what: str, path: str, revision: str | None, model: PreTrainedModel) -> str:
    """16 hex digits of SHA-256 over all that decides a model's logits: weights, config, and its own code if it has some."""
    values = model.config.to_diff_dict() if path.endswith(GGUF) else config_values(what, path, revision)
    told = json.loads(
        json.dumps(values, default=str), object_hook=lambda one: {k: v for k, v in one.items() if k not in INERT}
    )
    digest = hashlib.sha256(f"{model_fingerprint(model)}{json.dumps(told, sort_keys=True)}".encode())
    if type(model).__module__.startswith("transformers_modules"):
        for file in sorted(Path(inspect.getfile(type(model))).parent.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def model_fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits of SHA-256 over the names, shapes and values of all weights.

    Values are hashed as float32, so the same weights in another exact precision give the same digits. Each tensor contributes the sum
    of the bits of all its values, which is exact in any order, and at most 4096 evenly spread values: fast for large models.
    """
    digest = hashlib.sha256()
    for weight, kept in each(sorted(model.state_dict().items()), "hashing weights"):
        for name, tensor in stored_parts(weight, kept):
            flat = tensor.reshape(-1)
            step = max(1, flat.numel() // 4096)
            bits = sum(part.float().view(torch.int32).sum(dtype=torch.int64) for part in flat.split(HASHED))
            digest.update(f"{name}{tuple(tensor.shape)}{int(bits)}".encode())
            digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits of SHA-256 over every token string with its id, the ids of special tokens, and all rules that turn text into ids."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    digest = hashlib.sha256(json.dumps([entries, sorted(tokenizer.all_special_ids)]).encode())
    core = getattr(tokenizer, "backend_tokenizer", None)
    for rules in (getattr(core, name, None) for name in ("normalizer", "pre_tokenizer", "model", "post_processor")):
        digest.update(rules.__getstate__() if rules is not None else b"-")
    return digest.hexdigest()[:16]
