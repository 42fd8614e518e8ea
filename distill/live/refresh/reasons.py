"""A reason against a refresh: the logged responses are not the target's own text."""

from pathlib import Path

import numpy as np
import torch

from data.responses.store import Store
from distill.config.layout import CONFIG, RESPONSES, TRAINING
from distill.config.load import load_config
from distill.live.alarm import Reason
from distill.models.target import Target
from distill.run.responses import frozen_responses_of
from speculative.explain.ceilings import target_peaks
from speculative.explain.text_law import text_law
from speculative.rules.sampling import SamplingSettings

ASKED_RESPONSES = 64
# Nats per token below expectation; share of first choices in greedy text. Rounding errors are a tenth of these.
FAR_NATS, LIKELIEST = 0.1, 0.9


class OwnText(Reason):
    """responses: number scored by the target."""

    responses: int


def own_words(home: Path, export: Path) -> OwnText:
    """Check a sample of the responses with one forward pass: are they the target's own text? Engines round differently, so only text far
    from it fails.
    """
    config, store = load_config(home / CONFIG), Store(export / RESPONSES / TRAINING)
    rows = store.rows()
    some = frozen_responses_of(rows[:: -(-len(rows) // ASKED_RESPONSES)])
    if config.target.endpoint is not None:
        return OwnText(holds=True, sentence="text: not checked: the target's weights are on a server", responses=0)
    target = Target(config.target, torch.device("cuda" if torch.cuda.is_available() else "cpu"), home).model
    sampling = SamplingSettings(**store.manifest()["sampling"])
    if sampling.greedy:
        share = float(np.concatenate([one.matches for one in target_peaks(target, some, sampling)]).mean())
        holds, words = share >= LIKELIEST, f"{100 * share:.1f} % of the tokens are the target's first choice"
    else:
        law = text_law(target, some, sampling)
        holds = law.same or law.log_prob > law.expected - FAR_NATS
        words = f"{law.log_prob:.2f} nats per token under the target, {law.expected:.2f} expected for its own text"
    words = f"text: {words} ({len(some)} responses)"
    if not holds:
        words += ": this is not the target's own text (mixed up? another target? other sampling settings?)"
    return OwnText(holds=bool(holds), sentence=words, responses=len(some))
