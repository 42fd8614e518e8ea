"""What an export knows of a run, and what the engines' rules look at: one target and one exported draft."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distill.config.layout import BEST_LINK, CONFIG, PROVENANCE, RESULT, STUDENT, VERDICT, run_of, step_folder
from distill.config.load import dump_config, load_trusted
from distill.config.sections import Quantization
from distill.export.gguf import pre_tokenizer_name
from distill.export.load_table import LoadRange, drafts_by
from distill.models.load import public_name, without_folders
from distill.models.quantized import quantization_of
from distill.models.target import TargetSide
from distill.models.vocabulary import TokenDifference, first_string_difference, tokens_by_id, vocabulary_rows
from distill.run.result import Curves, load_result
from distill.run.verdict_record import WAYS, Verdict, drafting_to_serve, load_verdict
from speculative.engine.models import mask_token_of, max_positions
from speculative.errors import UserError
from speculative.measure.load import MOST_LOAD
from speculative.measure.measured import DRAFT, LOOKUP, TOGETHER, Measured
from speculative.measure.record import Record
from speculative.rules.sampling import SamplingSettings

LLAMA_CPP_FIRST_COMPARED_ID = 5
GAMMA_WITHOUT_VERDICT = 4


@dataclass(frozen=True)
class RunFacts:
    """What an export needs to know: the student and its target, what was measured of them, how they are served.

    student_dir: a Hugging Face model directory, or a peft adapter directory. target: directory or hub id, or `embedded`. verdict: None
    when nothing was measured. curves: what replay predicts under each rule.
    """

    student_dir: Path
    target: str
    verdict: Verdict | None = None
    curves: Curves | None = None
    provenance: dict[str, Any] | None = None
    sampling: SamplingSettings | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    quantize: Quantization | None = None


def read_run(path: Path, trusted: bool = False) -> RunFacts:
    """Facts of a run's best checkpoint, or of one checkpoint of a run. ``trusted``: see `load_trusted`.

    Raises:
        UserError: neither a run's folder nor a checkpoint of one, or nothing judged yet.
    """
    run = run_of(path)
    if run is None:
        raise UserError(f"{path}: neither a run's folder (config.yaml in it) nor a checkpoint of one")
    folder = path if run != path else run / BEST_LINK
    if not (folder / STUDENT).exists():
        raise UserError(f"{path}: no checkpoint there yet; finish the run first (the same command goes on)")
    config = load_trusted(run / CONFIG, trusted)
    verdict = load_verdict(run) if (run / VERDICT).exists() else None
    if verdict is not None and folder.resolve() != step_folder(run, verdict.drafts[-1].step or 0).resolve():
        verdict = None  # the verdict is of another checkpoint
    curves = load_result(run / RESULT).curves if verdict is not None and (run / RESULT).exists() else None
    provenance = Record.read(folder / PROVENANCE, "start the run's command again").record()
    data = [source.path for source in config.data.train]
    base = config.student.path and public_name(config.student.path)
    provenance |= {"data": data, "config": dump_config(config), "base": base}
    provenance = json.loads(without_folders(json.dumps(provenance)))
    where = config.target
    return RunFacts(
        folder / STUDENT, where.path, verdict, curves, provenance, config.serving.sampling, where.revision,
        where.trust_remote_code, config.export.quantize,
    )  # fmt: skip


class OnePass(NamedTuple):
    """A draft that proposes a whole block in one forward, where that is the faster way: the mask token, gamma and taus then."""

    mask_token: int
    gamma: int
    taus: Mapping[str, float]


@dataclass(frozen=True)
class EngineFacts:
    """The pair, how it was measured and how it is to be served. `taus`: tokens per target call at `gamma` by rule, by replay.

    `gamma` and `taus` are of a draft that proposes token by token, where `one_pass` stands beside them.
    """

    target: str  # hub id or directory
    draft: str  # the exported directory
    gamma: int
    target_rows: int
    draft_rows: int
    first_difference: TokenDifference | None  # over all ids: `get_vocab()` of the two tokenizers
    first_difference_from_5: TokenDifference | None
    added_tokens_equal: bool
    added_ends_equal: bool  # what the tokenizers put around a text (bos, eos), which most do not
    tokenizer_kind_equal: bool
    target_quantised: bool
    draft_quantised: bool = False
    pre_tokenizer: str | None = None  # llama.cpp's name for how the target's tokenizer cuts text
    draft_context: int | None = None  # tokens, where it is shorter than the target's
    measured_rule: str | None = None  # the rule of the run's verdict, None when not measured
    sampling: SamplingSettings | None = None  # of the run; None: not known
    taus: Mapping[str, float] = field(default_factory=dict)
    gamma_by_load: tuple[LoadRange, ...] = ()  # empty: not measured under load
    one_pass: OnePass | None = None
    lookup: Measured | None = None  # prompt lookup without a draft, as it was timed beside it
    together: Measured | None = (
        None  # prompt lookup before the draft, token by token, where the run found that to be what to run
    )

    @property
    def sampled(self) -> bool:
        return self.sampling is not None and not self.sampling.greedy

    @property
    def sampled_drafts_win(self) -> bool:
        """Whether drafting by sampling is predicted to be accepted more than drafting the argmax."""
        return self.sampled and self.taus.get("sample", 0.0) > self.taus.get("greedy-draft", float("inf"))

    @property
    def request(self) -> dict[str, float | int]:
        """The measured settings as a request's JSON has them; what is off is left out."""
        if self.sampling is None:
            return {}
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        asked = {"temperature": self.sampling.temperature} if self.sampling.greedy else self.sampling.as_dict()
        return {name: value for name, value in asked.items() if value != off.get(name)}

    @property
    def by_load(self) -> bool:
        """Whether gamma is to follow the number of concurrent requests."""
        return len(self.gamma_by_load) > 1 and any(gamma for _, _, gamma in self.gamma_by_load)

    @property
    def largest_gamma(self) -> int:
        """The most that is drafted at any load."""
        return max(gamma for _, _, gamma in self.gamma_by_load) if self.by_load else self.gamma

    @property
    def load_advice(self) -> str:
        """What to do where gamma cannot follow the load."""
        if self.most_load is not None:
            return f"Drafting pays up to {self.most_load} concurrent requests: cap a server with the draft there"
        pays = any(gamma for _, _, gamma in self.gamma_by_load)
        return (
            "Drafting pays at every load: no cap is needed"
            if pays
            else "Drafting pays at no load: serve the target alone"
        )

    def predicted(self, rule: str) -> str:
        """tau under a rule, in words."""
        tau = self.taus.get(rule)
        return "nothing was predicted" if tau is None else f"replay predicts tau {tau:.2f}"

    @staticmethod
    def timed(one: Measured) -> str:
        """What a way was timed at, in words."""
        ends = f" [{one.speed_up_ci[0]:.2f}, {one.speed_up_ci[1]:.2f}]" if one.speed_up_ci else ""
        return f"timed at {one.speed_up:.2f}x{ends} the target alone"

    @property
    def most_load(self) -> int | None:
        """The most concurrent requests at which drafting pays; None where it pays at all or at none, or was not measured."""
        paying = [last for _, last, gamma in self.gamma_by_load if gamma]
        return paying[-1] if paying and paying[-1] < MOST_LOAD else None


def serving_gamma(verdict: Verdict | None, way: str = DRAFT) -> tuple[int, str, bool | None]:
    """(gamma of the commands, where it comes from, whether the draft was measured to pay; None = not measured).

    It is the gamma that was timed as the draft's best for one request at a time.
    """
    if verdict is None:
        return GAMMA_WITHOUT_VERDICT, "a default, not measured", None
    row = verdict.row(way) or verdict.row(DRAFT)
    if row is None or row.speed_up is None:
        return max(1, verdict.gamma), "the gamma of the verdict; no speed was timed", None
    if not row.gamma:
        return max(1, verdict.gamma), "the gamma of the verdict; no gamma gained", False
    return row.gamma, "the best timed for one request at a time", verdict.pays


def ways_to_serve(
    verdict: Verdict | None, curves: Curves | None, draft_config: Any
) -> tuple[int, Mapping[str, float], OnePass | None]:
    """(gamma and taus of drafting token by token, the same of one pass a block where that is what should be run)."""
    mask_token, names = mask_token_of(draft_config), drafts_by(verdict)

    def served(way: str) -> tuple[int, Mapping[str, float]]:
        gamma = serving_gamma(verdict, way)[0]
        return gamma, curves.taus_at(gamma, way) if curves else {}

    single = served(names["autoregressive"])
    if mask_token is None or drafting_to_serve(verdict, True) != "parallel":
        return *single, None
    return *single, OnePass(mask_token, *served(names["parallel"]))


def lookups_of(verdict: Verdict | None) -> dict[str, Measured | None]:
    """The fields `lookup` and `together` of a verdict."""
    if verdict is None:
        return {}
    lookup, both = verdict.row(LOOKUP), verdict.row(TOGETHER)
    own = next((one.drafting for one in verdict.drafts if one.way == DRAFT), "autoregressive")
    single = both is not None and (
        both.behind == WAYS["autoregressive"] or (own == "autoregressive" and both.behind != WAYS["parallel"])
    )
    return {"lookup": lookup, "together": both if single and verdict.to_run() == TOGETHER else None}


def gather_facts(target: TargetSide, draft: TargetSide, path: str, gamma: int, **served: Any) -> EngineFacts:
    """The facts of a pair from its loaded configs and tokenizers. path: of the draft; served: the fields with a default of their own."""
    target_tokens, draft_tokens = tokens_by_id(target.tokenizer), tokens_by_id(draft.tokenizer)
    return EngineFacts(
        target=target.name,
        draft=path,
        gamma=gamma,
        target_rows=vocabulary_rows(target.config),
        draft_rows=vocabulary_rows(draft.config),
        first_difference=first_string_difference(target_tokens, draft_tokens),
        first_difference_from_5=first_string_difference(target_tokens, draft_tokens, LLAMA_CPP_FIRST_COMPARED_ID),
        added_tokens_equal=target.tokenizer.get_added_vocab() == draft.tokenizer.get_added_vocab(),
        added_ends_equal=target.tokenizer("")["input_ids"] == draft.tokenizer("")["input_ids"],
        tokenizer_kind_equal=type(target.tokenizer) is type(draft.tokenizer),
        target_quantised=quantization_of(target.config) is not None,
        draft_quantised=quantization_of(draft.config) is not None,
        pre_tokenizer=pre_tokenizer_name(target.tokenizer),
        draft_context=shorter_context(draft.config, target.config),
        **served,
    )


def shorter_context(draft_config: Any, target_config: Any) -> int | None:
    """Tokens that the draft takes, where the target takes more."""
    draft, target = max_positions(draft_config), max_positions(target_config)
    return draft if draft and target and draft < target else None
