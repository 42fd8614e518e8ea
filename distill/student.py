"""The draft's first weights: a ready-made model, layers carved from the target, or random ones; and the module that trains."""

import copy
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from data.signals import DenseSignal, Signal
from distill.heads import SplitModel
from distill.layers import layer_list, per_layer_fields
from distill.objective import Objective, chunked_loss
from distill.step_clock import StepClock
from speculative.errors import UserError

if TYPE_CHECKING:  # pydantic is not needed to load and to train a draft
    from distill.sections import StudentConfig

EMBEDDED = "embedded"
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"


def resolve(path: str) -> str:
    """`embedded` -> the folder of the target shipped with us; anything else as it is."""
    if path == EMBEDDED:
        return str(EMBEDDED_FOLDER)
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _reason(error: Exception) -> str:
    """The first line of an error; transformers' config validation has its reason on the second."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if isinstance(error, StrictDataclassError) else 1])


def _load(what: str, path: str, load: Any, **options: Any) -> Any:
    """Calls a `from_pretrained` and turns its ways of failing into one line."""
    local = resolve(path)
    looks_local = local.startswith((".", "/", "~")) or Path(local).exists()
    if looks_local and not (Path(local) / "config.json").exists() and what != "tokenizer":
        raise UserError(f"{what} {path!r}: no config.json there; give a Hugging Face model directory or a hub id")
    # A bar is for downloads: the ones for reading local weights break our own progress lines.
    (disable_progress_bar if looks_local else enable_progress_bar)()
    try:
        return load(local, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        reason = _reason(error)
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
) -> PreTrainedModel:
    """A causal LM from a directory, hub id or `embedded`, in eval mode. ``what`` is its name in errors.

    Raises:
        UserError: not there, not loadable, hub not reachable.
    """
    options = {"dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    return _load(what, path, AutoModelForCausalLM.from_pretrained, **options).eval()


def saved_dtype(
    path: str, model: PreTrainedModel, *, revision: str | None = None, trust_remote_code: bool = False
) -> torch.dtype:
    """The dtype that the weights at ``path`` are saved in, whatever ``model`` was loaded as: the one drafts are served in."""
    config = AutoConfig.from_pretrained(resolve(path), revision=revision, trust_remote_code=trust_remote_code)
    saved = getattr(config.get_text_config(), "dtype", None)
    return saved if isinstance(saved, torch.dtype) else model.dtype


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """A tokenizer from a directory, hub id or `embedded`.

    Raises:
        UserError: not there, not loadable, hub not reachable.
    """
    return _load(
        "tokenizer", path, AutoTokenizer.from_pretrained, revision=revision, trust_remote_code=trust_remote_code
    )


def carve(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A draft made of some of the target's layers, its embeddings, final norm and head; all copied, float32.

    Raises:
        UserError: a layer the target does not have, the same layer twice, an architecture without a plain list of layers.
    """
    depth = target.config.get_text_config().num_hidden_layers
    chosen = [layer + depth if layer < 0 else layer for layer in layers]
    if not chosen or any(not 0 <= layer < depth for layer in chosen):
        raise UserError(f"student.layers = {list(layers)}: the target has layers 0 to {depth - 1} (or -{depth} to -1)")
    if len(set(chosen)) != len(chosen):
        raise UserError(f"student.layers = {list(layers)}: names a layer of the target twice")
    config = copy.deepcopy(target.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = len(chosen)
    # Per-layer settings (sliding or full attention, dense or sparse MLP) travel with their layers.
    for name, value in per_layer_fields(target.config.get_text_config()).items():
        setattr(text_config, name, [value[layer] for layer in chosen])
    prefix = layer_list(target)[0] + "."
    state = {}
    for key, value in target.state_dict().items():
        if not key.startswith(prefix):
            state[key] = value
            continue
        index, _, rest = key.removeprefix(prefix).partition(".")
        if int(index) in chosen:
            state[f"{prefix}{chosen.index(int(index))}.{rest}"] = value
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing = draft.load_state_dict({key: value.float() for key, value in state.items()}, strict=False)
    if missing.unexpected_keys or missing.missing_keys:
        raise UserError(
            f"{type(target).__name__} cannot be carved: weights {(missing.missing_keys or missing.unexpected_keys)[:3]}"
        )
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.eval()


def find_student(path: str) -> str:
    """A run's folder, a checkpoint's folder or a model directory -> the model directory; a hub id stays as it is."""
    folder = Path(path)
    for candidate in (folder / "best" / "student", folder / "student", folder):
        if (candidate / "config.json").exists():
            return str(candidate)
    return path


def context_of(student: "StudentConfig") -> int | None:
    """The context that a draft was made for, from its config alone; None when it is the target's own.

    Raises:
        UserError: no readable config at student.path, an unknown model type.
    """
    if student.init == "pretrained":
        config = _load("student.path", str(student.path), AutoConfig.from_pretrained, revision=student.revision)
        return getattr(config.get_text_config(), "max_position_embeddings", None)
    if student.init == "config":
        fields = dict(student.architecture or {})
        try:
            config = AutoConfig.for_model(str(fields.pop("model_type", None)), **fields)
        except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
            raise UserError(f"student.architecture: {_reason(error)}") from error
        return getattr(config.get_text_config(), "max_position_embeddings", None)
    return None


def from_architecture(
    architecture: dict[str, Any], tokenizer: PreTrainedTokenizerBase, vocab_rows: int, seed: int
) -> PreTrainedModel:
    """A draft with random weights; vocabulary and special ids are the tokenizer's.

    Raises:
        UserError: no or unknown `model_type`, an unknown or impossible field.
    """
    fields = dict(architecture)
    model_type = fields.pop("model_type", None)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    try:
        # transformers takes any field and ignores the ones it does not know.
        plain = AutoConfig.for_model(str(model_type))
        for name in fields:
            if not hasattr(plain, name):
                near = difflib.get_close_matches(name, plain.to_dict(), n=1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise UserError(f"student.architecture.{name}: {model_type} has no such field{hint}")
        config = AutoConfig.for_model(str(model_type), **{"vocab_size": vocab_rows, **ids, **fields})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"student.architecture: {_reason(error)}") from error


def add_lora(model: PreTrainedModel, rank: int, alpha: int, dropout: float, target_modules: Sequence[str] | str) -> Any:
    """The model with trainable low-rank adapters and everything else frozen (peft).

    Raises:
        UserError: a module name that the model does not have.
    """
    from peft import LoraConfig, get_peft_model

    modules = target_modules if isinstance(target_modules, str) else list(target_modules)
    lora = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules, task_type="CAUSAL_LM")
    try:
        adapted = get_peft_model(model, lora)
    except ValueError as error:
        raise UserError(f"student.lora.target_modules = {modules}: {str(error).splitlines()[0][:200]}") from error
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted_table = any(
        "lora_" in name for table in tables if table is not None for name, _ in table.named_parameters()
    )
    if adapted_table and model.config.get_text_config().tie_word_embeddings:
        raise UserError(
            f"student.lora.target_modules = {modules}: the head is tied to the embedding, and merging an adapter into one "
            "would change the other; leave lm_head and the embedding out"
        )
    return adapted


class DraftModule(nn.Module):
    """What Accelerate wraps: its forward makes the loss, so that every parameter's gradient passes the wrapper's hooks."""

    def __init__(self, student: nn.Module, objective: Objective) -> None:
        """``student`` is a causal LM, or a peft model around one."""
        super().__init__()
        self.student = student
        self.objective = objective
        self.clock: StepClock | None = None
        # A peft model wraps a causal LM whose layers carry the adapters in place.
        adapted: Any = student
        inner: Any = adapted.get_base_model() if hasattr(student, "get_base_model") else student
        # In a tuple: a plain attribute, not a second registration of the same module.
        self._split = (SplitModel(inner),)

    @property
    def inner(self) -> PreTrainedModel:
        """The causal LM that trains, inside its adapters if it has any."""
        return self._split[0].model

    def forward(
        self,
        input_ids_BT: Tensor,
        rows_R: Tensor,
        labels_R: Tensor,
        signal: Signal | None = None,
        weights_R: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        reference: DenseSignal | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(summed loss, summed overlap, what the overlap may lack) over the R response tokens of a micro-batch."""
        split = self._split[0]
        hidden_BTD = split.hidden(input_ids_BT, position_ids_BT)
        hidden_RD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[rows_R]
        if self.clock is not None:
            self.clock.mark("student")
        sums = chunked_loss(self.objective, hidden_RD, split.head, signal, labels_R, weights_R, reference=reference)
        if self.clock is not None:
            self.clock.mark("loss")
        return sums.loss, sums.overlap, sums.overlap_slack

    def exported(self) -> PreTrainedModel:
        """A float32 causal LM of the current weights: adapters merged into a copy, otherwise the student itself."""
        if not hasattr(self.student, "merge_and_unload"):
            return self.student  # type: ignore[return-value]
        adapted: Any = copy.deepcopy(self.student)
        return adapted.merge_and_unload()
