"""Result of a probe: rows of `Measured`, the price of each way, and a decision and a sentence for each draft and for all."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distill.commands.probe.memory import Memory
from distill.verdict.sentence import capitalised
from speculative.drafters.draft import Draft
from speculative.explain.ceilings import WORTH_DISTILLING, WORTHWHILE, Outlook, Price
from speculative.measure.measured import BY_BLOCK, BY_TOKEN, DRAFT, Measured

FORMAT = 2


@dataclass(frozen=True)
class ModelFacts:
    """Name, size and limits of a model."""

    name: str
    parameters: int
    layers: int | None
    context: int | None
    vocabulary_rows: int
    dtype: str


@dataclass
class ProbedDraft:
    """A draft with one way of drafting. If it cannot be used, `draft` is None and `refused` is the reason.

    prices: for each rule at the first batch size, the leading rule first, then for the leading rule at the other sizes. outlooks: for
    each text and rule; `lead` is the one that decides.
    """

    name: str
    model: ModelFacts
    vocabulary: str
    refused: str | None = None
    draft: Draft | None = None
    notes: list[str] = field(default_factory=list)
    prices: list[Price] = field(default_factory=list)
    outlooks: list[Outlook] = field(default_factory=list)
    lead: Outlook | None = None
    at_loads: list[Measured] = field(default_factory=list)
    detectable_alpha: float | None = None

    @property
    def go(self) -> bool:
        return self.lead is not None and self.lead.decision in WORTH_DISTILLING

    @property
    def pace(self) -> tuple[float, float]:
        """Predicted speed-ups before and after distilling."""
        assert self.lead is not None
        return self.lead.now.speed_up or 1.0, self.lead.distilled.speed_up or 1.0

    @property
    def drafting(self) -> str:
        parallel = self.draft is not None and self.draft.parallel
        return (BY_BLOCK if parallel else BY_TOKEN).removeprefix(f"{DRAFT}, ")

    def record(self) -> dict[str, Any]:
        """As JSON, without the rows, which are in `measured`."""
        decisions = [
            {"text": item.now.text, "rule": item.now.rule, "decision": item.decision} for item in self.outlooks
        ]
        return asdict(self.model) | {
            "name": self.name,
            "drafting": self.drafting,
            "vocabulary": self.vocabulary,
            "refused": self.refused,
            "notes": self.notes,
            "decisions": decisions,
            "go": self.go,
            "detectable_alpha": self.detectable_alpha,
            "decision": None if self.lead is None else self.lead.decision,
            "survival": None if self.lead is None else self.lead.survival,
        }


@dataclass(frozen=True)
class TextFacts:
    """The target's answers at one temperature. repeated, looping: shares of their tokens. proposes, hits: shares of the
    tokens where prompt lookup proposes, and is right. greedy_alpha: the highest alpha of a draft that proposes its
    argmax; null at temperature 0.
    """

    text: str
    tokens: int
    repeated: float
    looping: float
    warning: str | None
    proposes: float
    hits: float
    greedy_alpha: float | None
    greedy_alpha_ci: tuple[float, float] | None


@dataclass(frozen=True)
class Settings:
    """The settings of the probe. lead: the text and rule that decide. times: `measured` or `given`."""

    prompts_from: str
    prompts: int
    chat: bool
    max_tokens: int
    lead_text: str
    lead_rule: str
    gammas: list[int]
    batch_sizes: list[int]
    times: str
    device: str
    threads: int


@dataclass(frozen=True)
class Probe:
    """Everything; `decision` is one of `ceilings.DecisionWord`, or `no_draft`. Speed-ups are predicted, of the first batch size
    unless a row has another concurrency. assumptions: those of the predictions.
    """

    target: ModelFacts
    settings: Settings
    checks: dict[str, Any]
    texts: list[TextFacts]
    target_prices: list[Price]
    lookups: list[Measured]
    drafts: list[ProbedDraft]
    assumptions: list[str]
    notes: list[str]
    memory: Memory | None
    seconds: dict[str, float]
    decision: str
    best: str | None
    drafting: str | None
    sentence: str

    @property
    def go(self) -> bool:
        return self.decision in WORTH_DISTILLING

    @property
    def usable(self) -> list[ProbedDraft]:
        """The drafts that could be judged."""
        return [one for one in self.drafts if one.refused is None]

    @property
    def measured(self) -> list[Measured]:
        """Every row: prompt lookup, then each draft's."""
        rows = list(self.lookups)
        for one in self.usable:
            rows += [*(row for each in one.outlooks for row in each.rows), *one.at_loads]
        return rows

    def record(self) -> dict[str, Any]:
        prices = [*self.target_prices, *(price for item in self.usable for price in item.prices)]
        names = ("checks", "assumptions", "notes", "seconds", "decision", "go", "best", "drafting", "sentence")
        return {
            "format": FORMAT,
            "target": asdict(self.target),
            "settings": asdict(self.settings),
            "texts": [asdict(item) for item in self.texts],
            "prices": [asdict(item) for item in prices],
            "measured": [row.record() for row in self.measured],
            "drafts": [item.record() for item in self.drafts],
            "memory": None if self.memory is None else asdict(self.memory),
            **{name: getattr(self, name) for name in names},
        }


def draft_sentence(probed: ProbedDraft, baseline: float) -> str:
    """The verdict about one draft in words; baseline: speed-up of prompt lookup."""
    lead = probed.lead
    assert lead is not None
    alone = _alone_sentence(probed.name, lead, probed.prices[0], baseline)
    if lead.decision == "hopeless" or not lead.after_lookup:
        return alone
    now, distilled = lead.after_lookup
    fast = f"{now.speed_up:.2f}x" + (f" at gamma {now.gamma}" if now.gamma else "")
    return f"{alone} With prompt lookup before it: {fast} as it is, {distilled.speed_up:.2f}x distilled."


def _alone_sentence(name: str, lead: Outlook, price: Price, baseline: float) -> str:
    now, distilled, ceiling = lead.now, lead.distilled, lead.ceiling
    alpha, pace = now.alpha or 0.0, now.speed_up or 1.0
    has = f"alpha {alpha:.3f}, " + (f"{pace:.2f}x at gamma {now.gamma}" if now.gamma else "no gamma pays off")
    hope = f"distilled to alpha {distilled.alpha:.2f}, the usual result from this start, it would give {distilled.speed_up:.2f}x"
    if lead.decision == "hopeless":
        return f"{name}: hopeless ({has}); {price.advice}."
    if lead.decision == "no_headroom":
        beaten = f"; prompt lookup gives {baseline:.2f}x" if baseline > pace else ""
        return (
            f"{name}: no headroom. Its alpha is {alpha:.3f} and its ceiling {ceiling.alpha:.3f}. Drafts that start "
            f"there gain about {(distilled.alpha or 0.0) - alpha:.3f}, so distilling cannot help much. Serve it as it is: {pace:.2f}x "
            f"at gamma {now.gamma}{beaten}."
        )
    if lead.decision == "already_pays":
        return f"{name}: go. It pays off without training ({has}). {capitalised(hope)}. Its ceiling is {ceiling.speed_up:.2f}x."
    if lead.decision == "needs_distillation":
        beaten = f" Prompt lookup gives {baseline:.2f}x without training." if baseline > max(pace, WORTHWHILE) else ""
        return f"{name}: go, but distil it first ({has}).{beaten} {capitalised(hope)}. Its ceiling is {ceiling.speed_up:.2f}x."
    bar = f"prompt lookup's {baseline:.2f}x" if baseline > WORTHWHILE else f"{WORTHWHILE}x"
    return f"{name}: no go ({has}). {capitalised(hope)}, which is below {bar}: take a better or a cheaper draft."


def overall(
    drafts: Sequence[ProbedDraft], lookup: Measured, planned: Price | None
) -> tuple[str, ProbedDraft | None, str]:
    """(decision, the most promising draft, one sentence for all). planned: the given times, if any."""
    by_model: dict[int, list[ProbedDraft]] = {}
    for way in drafts:
        if way.draft is not None:
            by_model.setdefault(id(way.draft.model), []).append(way)
    ways = [sorted(of, key=lambda way: way.pace, reverse=True) for of in by_model.values()]
    baseline = lookup.speed_up or 1.0
    free = "Prompt lookup gives no speed-up here."
    if baseline >= 1.05:
        free = f"Prompt lookup alone gives {baseline:.2f}x without training; a draft must be faster."
    if not ways:
        return _without_drafts(planned, free)
    best = max((of[0] for of in ways), key=lambda way: (way.go, way.pace[1]))
    goes, words = [of[0] for of in ways if of[0].go], draft_sentence(best, baseline)
    if len(ways) == 1:
        sentence = f"{words} {free}"
    elif not goes:
        sentence = f"No go: none of {len(ways)} drafts is worth distilling. The best is {words} {free}"
    else:
        sentence = f"Go with {best.name} ({len(goes)} of {len(ways)} drafts are worth distilling). {words} {free}"
    others = next(of for of in ways if of[0] is best)
    if len(others) > 1:
        gives = ", ".join(f"{way.drafting} gives {way.pace[0]:.2f}x" for way in others)
        sentence += f" As it is, drafting {gives}."
    assert best.lead is not None
    return best.lead.decision, best, sentence


def _without_drafts(planned: Price | None, free: str) -> tuple[str, None, str]:
    if planned is None:
        return "no_draft", None, f"No draft was given. {free}"
    needed = planned.break_even_alpha.get(5)
    start = "No draft was given" if planned.hopeless is None else "Hopeless"
    alpha = "no alpha pays at gamma 5" if needed is None else f"alpha must be above {needed:.2f} to pay off at gamma 5"
    gives = f"at c = {planned.cost_ratio:.2f} a perfect draft gives {planned.perfect_speed_up:.2f}x"
    return "no_draft" if planned.hopeless is None else "hopeless", None, f"{start}: {gives}; {alpha}. {free}"
