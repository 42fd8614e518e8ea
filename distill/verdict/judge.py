"""Judge a checkpoint by speculative decoding of the held-out prompts. The score is tau under the configured rule."""

from collections.abc import Sequence
from typing import Any

from distill.config.sections import JudgeConfig
from distill.models.draft import as_exported, load_draft
from distill.models.target import Target
from distill.training.module import DraftModule
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, Drafting
from speculative.engine.memory import release
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse, Judgement, judge, judge_frozen
from speculative.measure.intervals import interval
from speculative.measure.replay import agreement_words, expected_blocks_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule


class DraftJudge:
    """Live decoding and replay on the frozen held-out responses. Only the main process uses it."""

    def __init__(
        self,
        judging: JudgeConfig,
        settings: DecodeSettings,
        target: Target,
        heldout: dict[Rule, list[HeldoutResponse]],
        drafting: Drafting = "autoregressive",
        others: Sequence[tuple[float, list[HeldoutResponse]]] = (),
    ) -> None:
        """``settings``: with the rule and gamma to judge under. ``heldout``: frozen target responses by rule, that one first.

        ``drafting``: how the draft will be served. ``others``: weight and frozen responses of other targets, whose tau counts in the score.
        """
        self.judging, self.settings, self.drafting = judging, settings, drafting
        self.target, self.heldout, self.others = target, heldout, others

    def __call__(self, step: int, module: DraftModule) -> dict[str, Any]:
        """{step, score, rule, gamma, alpha, tau, ..., domains, replay, greedy: the same for greedy decoding}.

        With judge.live: end, tau is by replay (`live` is false) and figures that need live decoding are missing.
        """
        draft = self._draft(module)
        main, *rest = (self.judge(draft, rule) for rule in self.heldout)
        taus = [(weight, judge_frozen(draft, text, self.settings).tau) for weight, text in self.others]
        release()  # Training needs the memory until the next checkpoint is judged.
        score = main.tau
        if taus:
            score = (score + sum(weight * tau for weight, tau in taus)) / (1.0 + sum(weight for weight, _ in taus))
        others = {rule: one.record() for rule, one in zip(list(self.heldout)[1:], rest, strict=True)}
        return {"step": step, "score": score} | main.record() | others

    def _draft(self, module: DraftModule) -> Draft:
        return Draft(as_exported(module.exported(), self.target), self.drafting)

    def dial(self, module: DraftModule) -> dict[str, float]:
        """{alpha, tau} on the frozen text of the configured rule: one draft pass, no target, on the main process."""
        rule, gamma = self.settings.rule, self.settings.gamma
        draft = self._draft(module)
        scores = score_tokens(draft.model, self.heldout[rule], self.settings.sampling, offsets=draft.offsets(gamma, 1))
        tokens = sum(map(len, scores))
        alpha = sum(own.accept_probs(rule).sum() for own in scores) / tokens
        return {"alpha": float(alpha), "tau": float(tokens / expected_blocks_of(scores, rule, (gamma,)).sum())}

    def judge(self, draft: Draft, rule: Rule) -> Judgement:
        """All numbers of a draft under one rule; live decoding of the held-out prompts needs the target's weights."""
        settings, heldout = self.settings.under(rule, self.settings.gamma), self.heldout[rule]
        if self.judging.live != "checkpoint":
            return judge_frozen(draft, heldout, settings)
        return judge(self.target.model, draft, heldout, settings, batch_size=self.judging.batch_size)[0]

    def headline(self, record: dict[str, Any]) -> str:
        """One line: alpha and tau with intervals, accepted/drafted; a warning when replay and live decoding disagree."""
        own = Judgement.model_validate(record)
        averaged = "  (averaged weights)" if own.weights == "ema" else ""
        if self.others:
            averaged = f"  score {own.score:.3f} on {1 + len(self.others)} targets{averaged}"
        start = f"step {own.step:>5}  {own.rule}  alpha {own.alpha:.3f} {interval(own.alpha_ci)}  "
        if not own.live:
            return f"{start}tau {own.tau:.2f} at gamma {own.gamma} by replay{averaged}"
        line = (
            f"{start}tau {own.tau:.2f} {interval(own.tau_ci, '.2f')} at gamma {own.gamma} "
            f"({agreement_words(own.replay_check, own.live_tokens or 0)})  "
            f"accepted/drafted {own.accepted_per_drafted:.3f}{averaged}"
        )
        return "\n  warning: ".join((line, *own.warnings))


def require_served(path: str | None, target: Target, longest: int) -> None:
    """Refuse, before the long work, a judge.served that could not be judged at the end.

    Raises:
        UserError: not there, another vocabulary, or a context shorter than `longest`, prompt and response.
    """
    if path is None:
        return
    limit = max_positions(load_draft(path, target).config)
    if limit is not None and limit < longest:
        raise UserError(
            f"judge.served: {path} reads at most {limit} tokens, but the longest held-out prompt and its response need up to "
            f"{longest}; remove judge.served, or lower data.max_prompt_tokens or serving.max_tokens"
        )
