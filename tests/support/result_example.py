"""A complete result.json as a finished run writes it, made by simulating two drafts: its numbers agree with each other.

Sums of `live_prompts` give tau, accepted / drafted and survival of the best draft; the token view shows the blocks of the first prompts;
the curves are replay of the simulated acceptance probabilities; speed-ups are tau / (gamma c + v).
"""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import numpy as np

from distill.run.result import Result
from speculative.measure.replay import replay

GAMMA = 4
GAMMAS = list(range(33))
LAST_TIMED = 16
C, V_EXTRA, TARGET_SECONDS = 0.255, 0.055, 0.0078
DOMAINS = ("python", "gsm8k", "chat")
PROMPTS = 24
LABELS = {"baseline": "undistilled", "served": "last served", "best": "distilled"}
SKILL = {"baseline": -0.9, "served": 0.2, "best": 0.8}
CODE = (
    "    total = 0\n    for price, count in items:\n        if count < 0:\n            raise ValueError(f\"count {count}\")\n"
    "\ttotal += price * count\n    return total\n\n# naïve: 3 € a piece → <b>bold</b> & more\n"
)  # fmt: skip
WORDS = re.findall(r"\n|\t| ?[^\W\d]+| ?\d+| +(?= )| ?[^\w\s]", CODE)


def v_of(gamma: int) -> float:
    """Seconds of a (gamma + 1)-token target call over a 1-token call."""
    return 1 + V_EXTRA * gamma


def speed(tau: float, gamma: int) -> float:
    return tau / (gamma * C + v_of(gamma))


def _interval(value: float, width: float) -> list[float]:
    return [value - width, value + 1.1 * width]


class Simulation:
    """Acceptance probabilities of three drafts at every token of every prompt, and the live blocks of the best."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.domains = [DOMAINS[index % 3] for index in range(PROMPTS)]
        ease = {"python": 0.6, "gsm8k": 0.1, "chat": -0.5}
        self.blocks: list[list[int]] = []
        self.probs: dict[str, list[np.ndarray]] = {name: [] for name in LABELS}
        for domain in self.domains:
            length = int(rng.integers(40, 90))
            hardness = np.convolve(rng.normal(0, 1.6, length + 4), [0.5, 0.3, 0.2], "valid")[:length] + ease[domain]
            probs = {name: 1 / (1 + np.exp(-(hardness + skill))) for name, skill in SKILL.items()}
            counts, position = [], 0
            while position < length - GAMMA:
                coins = rng.random(GAMMA) < probs["best"][position : position + GAMMA]
                accepted = int(np.argmin(coins)) if not coins.all() else GAMMA
                counts.append(accepted)
                position += accepted + 1
            self.blocks.append(counts)
            for name, values in probs.items():
                self.probs[name].append(values[:position])

    def alpha(self, name: str, rows: list[int] | None = None) -> float:
        rows = list(range(PROMPTS)) if rows is None else rows
        return float(np.concatenate([self.probs[name][row] for row in rows]).mean())

    def taus(self, name: str, tilt: float = 1.0) -> list[float]:
        """Replay tau at gammas 0..32; `tilt` scales the probabilities for another rule."""
        probs = [values * tilt for values in self.probs[name]]
        return [1.0, *replay(probs, GAMMAS[1:]).values()]

    def survival(self, name: str) -> list[float]:
        if name == "best":
            counts = np.array(list(itertools.chain(*self.blocks)))
            return [float((counts >= j).mean()) for j in range(1, GAMMA + 1)]
        alpha = self.alpha(name)
        return [alpha**j * (1 + 0.02 * j) for j in range(1, GAMMA + 1)]


def _live_prompts(made: Simulation) -> list[dict[str, Any]]:
    return [
        {
            "key": f"{domain}-{row:03d}", "domain": domain, "prompt_tokens": 20 + 7 * (row % 5), "tokens": sum(counts) + len(counts),
            "blocks": len(counts), "drafted": GAMMA * len(counts), "accepted": sum(counts),
        }
        for row, (domain, counts) in enumerate(zip(made.domains, made.blocks, strict=True))
    ]  # fmt: skip


def _top(rng: np.random.Generator, first: str) -> list[list[Any]]:
    others = [word for word in dict.fromkeys(WORDS) if word != first]
    picked = [first, *(others[index] for index in rng.permutation(len(others))[:4])]
    shares = sorted(rng.dirichlet(np.ones(6) * 0.6), reverse=True)[:5]
    return [[word, float(share)] for word, share in zip(picked, shares, strict=True)]


def _token_view(made: Simulation, live: list[dict[str, Any]], count: int) -> dict[str, Any]:
    rng, responses = made.rng, []
    for row in range(count):
        kinds = [
            (by, block)
            for block, accepted in enumerate(made.blocks[row])
            for by in ["draft"] * accepted + ["bonus" if accepted == GAMMA else "target"]
        ]
        tokens = []
        for place, (by, block) in enumerate(kinds):
            text = WORDS[(place + 5 * row) % len(WORDS)]
            target_top = _top(rng, text)
            draft_top = _top(rng, text if by != "target" else WORDS[(place + 9) % len(WORDS)])
            tokens.append(
                {
                    "text": text, "id": 300 + WORDS.index(text), "by": by, "block": block, "target_prob": target_top[0][1],
                    "draft_prob": draft_top[0][1] if by != "target" else 0.01, "target_top": target_top, "draft_top": draft_top,
                }
            )  # fmt: skip
        facts = live[row]
        responses.append(
            {
                "key": facts["key"], "domain": facts["domain"], "prompt": f"def total_{row}(items):\n    \"\"\"The sum of {row} prices.\"\"\"\n",
                "tokens": tokens, "blocks": facts["blocks"], "accepted": facts["accepted"], "drafted": facts["drafted"],
                "tokens_count": facts["tokens"],
            }
        )  # fmt: skip
    return {"contestant": "best", "rule": "sample", "gamma": GAMMA, "responses": responses}


def _contestants(made: Simulation, tau_live: float, drafted_share: float) -> list[dict[str, Any]]:
    rows = []
    for name, label in LABELS.items():
        alpha = made.alpha(name)
        tau = tau_live if name == "best" else made.taus(name)[GAMMA]
        fast = speed(tau, GAMMA)
        rows.append(
            {
                "name": name, "label": label, "path": f"runs/tiny/{name}", "step": {"baseline": 0, "best": 120}.get(name), "alpha": alpha,
                "alpha_ci": _interval(alpha, 0.011), "tau": tau, "tau_ci": None if name == "served" else _interval(tau, 0.06),
                "tau_by": "replay" if name == "served" else "live",
                "accepted_per_drafted": {"best": drafted_share, "baseline": (tau - 1) / GAMMA}.get(name),
                "survival": made.survival(name), "speed_up": None if name == "served" else fast,
                "speed_up_ci": None if name == "served" else _interval(fast, 0.03),
                "tokens_per_second": None if name == "served" else fast / TARGET_SECONDS,
            }
        )  # fmt: skip
    return rows


def _curve(made: Simulation, name: str, rule: str, tilt: float) -> dict[str, Any]:
    taus, alpha = made.taus(name, tilt), made.alpha(name) * tilt
    return {
        "rule": rule, "alpha": alpha, "alpha_ci": _interval(alpha, 0.011), "tokens": sum(map(len, made.probs[name])), "prompts": PROMPTS,
        "gammas": GAMMAS, "tau": taus, "tau_ci": [_interval(tau, 0.015 * (tau - 1)) for tau in taus],
        "survival": [alpha**j for j in range(1, 17)],
        "speed_up": [speed(tau, gamma) if gamma <= LAST_TIMED else None for gamma, tau in zip(GAMMAS, taus, strict=True)],
    }  # fmt: skip


def _slices(made: Simulation) -> list[dict[str, Any]]:
    def row(name: str, rows: list[int], share: float, shift: float = 0.0) -> dict[str, Any]:
        alphas = {who: made.alpha(who, rows) + shift for who in LABELS}
        gain = alphas["best"] - alphas["baseline"]
        return {
            "name": name, "tokens": sum(len(made.probs["best"][index]) for index in rows), "prompts": len(rows), "alpha": alphas,
            "alpha_ci": {who: _interval(alpha, 0.02) for who, alpha in alphas.items()}, "gain": gain, "gain_ci": _interval(gain, 0.02),
            "certain": "gain", "lost_share": share,
        }  # fmt: skip

    lost = {
        d: sum((1 - v).sum() for v, o in zip(made.probs["best"], made.domains, strict=True) if o == d) for d in DOMAINS
    }
    of = {d: [i for i, o in enumerate(made.domains) if o == d] for d in DOMAINS}
    everyone = list(range(PROMPTS))
    classes = ["word start", "continuation", "digits", "punctuation", "identifier", "whitespace"]
    shares = [0.34, 0.11, 0.21, 0.08, 0.2, 0.06]
    worse = row("digits", everyone, 0.21, -0.1) | {"gain": -0.031, "gain_ci": [-0.05, -0.012], "certain": "loss"}
    tables = [
        {"dimension": "domain", "unit": "", "rows": [row(d, of[d], float(lost[d] / sum(lost.values()))) for d in DOMAINS]},
        {"dimension": "position", "unit": "tokens", "rows": [
            row("1-16", everyone, 0.38, -0.04), row("17-64", everyone, 0.44), row("65 and more", everyone, 0.18, 0.03)]},
        {"dimension": "token class", "unit": "", "rows": [
            worse if name == "digits" else row(name, everyone, share, 0.05 - share / 3)
            for name, share in zip(classes, shares, strict=True)]},
        {"dimension": "target entropy", "unit": "nats", "rows": [
            row("under 0.5", everyone, 0.2, 0.15), row("0.5 to 2", everyone, 0.5), row("over 2", everyone, 0.3, -0.2)]},
    ]  # fmt: skip
    return [table | {"corrected_confidence": 1 - 0.05 / len(table["rows"])} for table in tables]


def _where(made: Simulation) -> list[dict[str, Any]]:
    of = {domain: [row for row, own in enumerate(made.domains) if own == domain] for domain in DOMAINS}
    parts = [("domain", domain, rows) for domain, rows in of.items()]
    parts += [("repetition", "up to 4 % repeated", of["chat"]), ("repetition", "more than 4 % repeated", of["python"])]
    found = []
    for place, (dimension, name, rows) in enumerate(parts):
        speed_up = {"best": 1.4, "lookup": 0.9 + 0.3 * place}
        best = max(speed_up, key=speed_up.__getitem__)
        found.append(
            {
                "dimension": dimension, "name": name, "tokens": sum(len(made.probs["best"][row]) for row in rows), "prompts": len(rows),
                "repeated": 0.04 * place, "looping": 0.01 * place, "speed_up": speed_up,
                "speed_up_ci": {who: _interval(value, 0.1) for who, value in speed_up.items()}, "best": best, "certain": place > 0,
            }
        )  # fmt: skip
    return found


def _repetition() -> dict[str, Any]:
    shares = {"python": (0.3, 0.02, 600), "gsm8k": (0.11, 0.0, 500), "chat": (0.021, 0.0, 480)}
    by_domain = {name: dict(zip(("repeated", "looping", "tokens"), own, strict=True)) for name, own in shares.items()}
    return {"repeated": 0.155, "looping": 0.0076, "tokens": 1580, "by_domain": by_domain, "warning": None}


def _disagreements(live: list[dict[str, Any]]) -> list[dict[str, Any]]:
    said = [
        ("if count", " <", " >", 31),
        ("total =", " 0", " 1", 22),
        ("items:\n", "\t", "    ", 17),
        ("a | b", "`x`", "*y*", 3),
    ]
    return [
        {
            "context": context, "target_said": target, "draft_wanted": draft, "count": count, "prompts": min(count, 9),
            "lost_share": count / 400, "tau_if_agreed": 2.6 + count / 400, "tokens_per_second_lost": count / 10,
            "example": {"key": live[index]["key"], "position": 3 + index},
        }
        for index, (context, target, draft, count) in enumerate(said)
    ]  # fmt: skip


def _calibration() -> dict[str, Any]:
    confident = [0.05 + 0.1 * index for index in range(10)]
    bins = [
        {
            "low": middle - 0.05, "high": middle + 0.05, "weight": 0.04 + 0.02 * index, "confidence": middle,
            "accepted": middle**1.2, "ci": None if index == 0 else [middle**1.2 - 0.03, min(1.0, middle**1.2 + 0.03)],
        }
        for index, middle in enumerate(confident)
    ]  # fmt: skip
    return {
        "rule": "sample", "name": "best", "bins": bins, "expected_error": 0.034, "stop_below": 0.3,
        "words": "the draft is overconfident by 0.034 on average: stop drafting behind a token of less than 0.30",
    }  # fmt: skip


def _verdict(made: Simulation, contestants: list[dict[str, Any]], tokens: int, blocks: int) -> dict[str, Any]:
    baseline, _, best = contestants
    gain = best["alpha"] - baseline["alpha"]
    tau_gain, speed_gain = best["tau"] - baseline["tau"], best["speed_up"] - baseline["speed_up"]
    taus = made.taus("best")
    chosen = max(range(1, 17), key=lambda gamma: speed(taus[gamma], gamma))
    effects = {
        "alpha": {"gain": gain, "ci": _interval(gain, 0.014)}, "tau": {"gain": tau_gain, "ci": _interval(tau_gain, 0.07)},
        "speed_up": {"gain": speed_gain, "ci": _interval(speed_gain, 0.04)}, "confidence": 0.95, "looks": 4,
        "corrected_confidence": 0.9875, "method": "paired bootstrap over prompts (BCa), Bonferroni over 4 looks", "prompts": PROMPTS, "tokens": tokens,
        "minimal_detectable": {"alpha": 0.02, "tau": 0.1}, "prompts_for_half": 4 * PROMPTS, "certain": "gain",
    }  # fmt: skip
    against_served = copy.deepcopy(effects) | {"alpha": {"gain": 0.04, "ci": [0.01, 0.07]}, "speed_up": None}
    check = {"predicted_blocks": blocks + 2.5, "live_blocks": blocks, "z": -0.2, "agrees": True}
    # Judged in passing, in another live run than the last one.
    checkpoint = {
        "step": 120, "alpha": best["alpha"], "tau": tokens / (blocks + 9), "live_tokens": tokens,
        "replay_check": check | {"live_blocks": blocks + 9, "z": 0.6},
    }  # fmt: skip
    return {
        "rule": "sample", "gamma": GAMMA, "prompts": PROMPTS, "tokens": tokens, "baseline": baseline,
        "best": best | {"replay_check": check, "live_tokens": tokens, "live": True},
        "target_tokens_per_second": 1 / TARGET_SECONDS, "speed_up": {"baseline": baseline["speed_up"], "best": best["speed_up"]},
        "speed_up_ci": {"baseline": baseline["speed_up_ci"], "best": best["speed_up_ci"]},
        "paired": {"alpha_gain": gain, "ci": effects["alpha"]["ci"]}, "replay": {str(g): taus[g] for g in range(1, 17)},
        "best_gamma": chosen, "predicted_speed_up": speed(taus[chosen], chosen), "costs": None, "checkpoints": [checkpoint],
        "self_checks": {}, "domains": {}, "repetition": _repetition(), "outcome": "pays_off", "pays_off": True, "effects": effects, "against_served": against_served,
        "warnings": ["the held-out prompts come from 3 domains; the served ones may not"],
        "sentence": f"It pays off: the distilled draft decodes {best['speed_up']:.2f}x as fast as the target alone at gamma {GAMMA} and "
        f"accepts {gain:+.3f} [{effects['alpha']['ci'][0]:+.3f}, {effects['alpha']['ci'][1]:+.3f}] alpha over the undistilled baseline.",
        "seconds": {"judge": 12.5}, "load": _load(), "plain_wins_from": 12, "latency": _latency(),
        "roofline": {
            "target_fixed_seconds": 0.0084, "target_seconds_per_token": 0.0002, "draft_fixed_seconds": 0.002,
            "draft_seconds_per_token": 0.0001, "free_tokens": 42.0,
        },
    }  # fmt: skip


def _load() -> list[dict[str, Any]]:
    rows = (
        (1, 5, 1.55, [1.4, 1.7], 1.6, 128.0),
        (4, 3, 1.33, [1.2, 1.48], 1.3, 410.0),
        (16, 1, 0.92, None, 0.95, 900.0),
    )
    return [
        {
            "concurrency": load, "gamma": gamma, "speed_up": faster, "speed_up_ci": ends, "predicted": predicted,
            "plain_tokens_per_second": plain, "tokens_per_second": faster * plain,
        }
        for load, gamma, faster, ends, predicted, plain in rows
    ]  # fmt: skip


def _latency() -> dict[str, Any]:
    def seconds(p50: float, p90: float, p99: float) -> dict[str, float]:
        return {"p50": p50, "p90": p90, "p99": p99}

    return {
        "target": {
            "first_token": seconds(0.02, 0.0255, 0.03), "per_token": seconds(0.008, 0.009, 0.01), "per_response": seconds(0.5, 0.9, 1.234),
        },
        "best": {
            "first_token": seconds(0.024, 0.029, 0.036), "per_token": seconds(0.005, 0.006, 0.008), "per_response": seconds(0.3, 0.6, 0.9),
        },
    }  # fmt: skip


def _steps(contestants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    baseline, _, best = contestants
    steps = []
    for step, share in ((0, 0.0), (40, 0.7), (80, 0.9), (120, 1.0)):
        alpha, tau = (baseline[key] + share * (best[key] - baseline[key]) for key in ("alpha", "tau"))
        gain = {"alpha_gain": alpha - baseline["alpha"], "ci": _interval(alpha - baseline["alpha"], 0.014)}
        steps.append(
            {
                "step": step, "alpha": alpha, "alpha_ci": _interval(alpha, 0.011), "tau": tau, "tau_ci": _interval(tau, 0.06),
                "gain": gain if step else None,
            }
        )  # fmt: skip
    return steps


def example_result(seed: int = 0, responses: int = 8) -> dict[str, Any]:
    """Everything a timed run with a baseline and a served draft has to show."""
    made = Simulation(seed)
    live = _live_prompts(made)
    tokens, blocks, drafted, accepted = (
        sum(row[key] for row in live) for key in ("tokens", "blocks", "drafted", "accepted")
    )
    contestants = _contestants(made, tokens / blocks, accepted / drafted)
    old, new = made.alpha("baseline") + 0.2, made.alpha("best")
    return {
        "format": 1, "kind": "run", "name": "tiny", "made": "2026-11-20T19:00:00+00:00",
        "verdict": _verdict(made, contestants, tokens, blocks), "contestants": contestants, "steps": _steps(contestants),
        "curves": {
            "gammas": GAMMAS,
            "rules": [
                {"rule": rule, "contestants": {name: _curve(made, name, rule, tilt) for name in LABELS}, "note": note}
                for rule, tilt, note in (("sample", 1.0, ""), ("greedy-draft", 0.93, "vLLM's default"), ("block", 1.02, ""))
            ],
            "refused": [{"rule": "greedy", "why": "needs text that was answered at temperature 0"}],
        },
        "costs": {
            "target_step_seconds": TARGET_SECONDS, "draft_step_seconds": C * TARGET_SECONDS, "cost_ratio": C,
            "verify_ratio": {str(g): v_of(g) for g in (1, 2, 3, 4, 5, 8, 12, 16)}, "batch_size": 1, "context": 128, "threads": 1,
        },
        "slices": _slices(made), "where": _where(made), "disagreements": _disagreements(live), "calibration": _calibration(),
        "forgetting": [
            {"domain": "python", "trained_on": True, "tokens": tokens, "alpha": {"baseline": made.alpha("baseline"), "best": new},
             "alpha_ci": {"best": _interval(new, 0.01)}, "change": {"gain": new - made.alpha("baseline"), "ci": [0.28, 0.34]}},
            {"domain": "old mail", "trained_on": False, "tokens": 900, "alpha": {"baseline": old, "best": old - 0.06},
             "alpha_ci": {"best": _interval(old - 0.06, 0.02)}, "change": {"gain": -0.06, "ci": [-0.08, -0.04]}},
        ],
        "live_prompts": live,
        "timed_prompts": [
            {"key": row["key"], "tokens_per_second": {"target": 128.0, **{name: 150.0 for name in LABELS if name != "served"}}}
            for row in live[:7]
        ],
        "token_view": _token_view(made, live, responses),
        "checks": {
            "prompts": 8, "tokens": 686, "dtype": "float32", "gamma": GAMMA, "alpha_replay": 0.9999997, "alpha_live": 1.0,
            "batch_size": 8, "alpha_noise": 0.0003, "alpha_tolerance": 0.0009, "greedy_equal": 8, "near_ties": [],
            "near_tie_tolerance": 0.00009, "warnings": [],
        },
        "serve": [
            {"engine": "vLLM", "ok": True, "language": "bash", "note": "draft argmax by default",
             "command": "vllm serve org/target --speculative-config '{\"method\":\"draft_model\",\"model\":\"/d\",\"num_speculative_tokens\":4}'"},
            {"engine": "llama.cpp", "ok": False, "language": "bash", "note": "refuses it: sizes differ by 200", "command": "llama-server -m T.gguf"},
        ],
        "config": "name: tiny\nserving:\n  temperature: 0.7\n",
        "provenance": {
            "commit": "fc6a3871ba19a9674f4de6f93105d3a55d56b593", "uncommitted_changes": "sha256 0123", "seed": 0,
            "argv": ["understudy", "train", "my config.yaml"], "versions": {"torch": "2.13.0", "transformers": "5.23.0"}, "python": "3.11.7",
            "machine": "x86_64", "device": "cpu", "threads": 2, "target": "org/target", "target_fingerprint": "1c4f9e6e44f936e7",
            "tokenizer_fingerprint": "f108d69317a78ea8", "sampling": {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        },
        "files": {"proposals": "proposals.parquet"},
    }  # fmt: skip


def typed(tree: dict[str, Any]) -> Result:
    """The result that such a file holds."""
    return Result.model_validate(copy.deepcopy(tree))


def not_timed(result: dict[str, Any]) -> dict[str, Any]:
    """The same run judged without the target's weights: replay alone, nothing decoded, nothing timed."""
    made = copy.deepcopy(result)
    for row in made["contestants"]:
        row |= {"tau_by": "replay", "tau_ci": None, "survival": None, "accepted_per_drafted": None}
        row |= {"speed_up": None, "speed_up_ci": None, "tokens_per_second": None}
    for step in made["steps"]:
        step |= {"tau_ci": None}
    for curves in made["curves"]["rules"]:
        for curve in curves["contestants"].values():
            curve["speed_up"] = None
    for row in made["disagreements"]:
        row["tokens_per_second_lost"] = None
    nothing = {
        "speed_up": None,
        "speed_up_ci": None,
        "best_gamma": None,
        "predicted_speed_up": None,
        "target_tokens_per_second": None,
        "load": [],
        "plain_wins_from": None,
        "roofline": None,
        "latency": {},
    }
    made["verdict"] |= nothing | {
        "outcome": "not_timed",
        "pays_off": None,
        "sentence": "Not timed here: the distilled draft has more.",
    }
    for effects in ("effects", "against_served"):
        made["verdict"][effects]["speed_up"] = None
    best = {key: made["verdict"]["best"][key] for key in ("step", "alpha", "tau")}
    made["verdict"] |= {"checkpoints": [best], "best": best}
    made |= dict.fromkeys(("costs", "token_view", "live_prompts", "timed_prompts"))
    return made | {"checks": {}, "where": []}


def no_baseline(result: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of one draft that was not trained here."""
    made = copy.deepcopy(result)
    made["kind"] = "evaluation"
    made["contestants"] = [row | {"step": None} for row in made["contestants"] if row["name"] == "best"]
    made["steps"], made["forgetting"], made["serve"] = [], [], []
    made["verdict"] |= {
        "baseline": None,
        "paired": None,
        "effects": None,
        "against_served": None,
        "speed_up": {"best": made["verdict"]["speed_up"]["best"]},
    }
    for curves in made["curves"]["rules"]:
        curves["contestants"] = {"best": curves["contestants"]["best"]}
    for row in (row for table in made["slices"] for row in table["rows"]):
        row |= {"alpha": {"best": row["alpha"]["best"]}, "gain": None, "gain_ci": None, "certain": "none"}
    return made


def greedy(result: dict[str, Any]) -> dict[str, Any]:
    """Temperature 0: one rule, and no probability of what was emitted."""
    made = copy.deepcopy(result)
    made["verdict"]["rule"] = made["token_view"]["rule"] = made["curves"]["rules"][0]["rule"] = "greedy"
    made["curves"] |= {"rules": made["curves"]["rules"][:1], "refused": []}
    made["provenance"]["sampling"] = {"temperature": 0.0}
    for response in made["token_view"]["responses"]:
        for token in response["tokens"]:
            token |= {"target_prob": None, "draft_prob": None}
    return made


def bare(result: dict[str, Any]) -> dict[str, Any]:
    """Only what every result has; each optional section is null or gone."""
    made = {key: copy.deepcopy(result[key]) for key in ("format", "kind", "name", "made", "verdict", "contestants")}
    made["verdict"] |= {"effects": None, "against_served": None, "warnings": [], "best_gamma": None, "costs": None}
    made["verdict"] |= {"repetition": None, "load": [], "plain_wins_from": None, "roofline": None, "latency": {}}
    made["verdict"]["target_tokens_per_second"] = None
    nothing = dict.fromkeys(("costs", "calibration", "live_prompts", "token_view", "curves"))
    return made | nothing | {"slices": [], "disagreements": [], "forgetting": []}
