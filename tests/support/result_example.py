"""A result.json as a finished run writes it: two drafts whose tokens are accepted independently, so that its numbers agree with each other.

Curves are tau = (1 - alpha^(gamma+1)) / (1 - alpha); speeds are
tau / (gamma c + v); the token view shows the blocks of the first prompts.
"""

from __future__ import annotations

import copy
from typing import Any

from distill.run.result import Result
from speculative.measure.measured import DRAFT, LOOKUP, LOOKUP_DRAFT, SERVED, TARGET, UNDISTILLED

GAMMA, GAMMAS, LAST_TIMED = 4, list(range(33)), 16
C, V_EXTRA, TARGET_SECONDS = 0.255, 0.055, 0.0078
DOMAINS = ("python", "gsm8k", "chat")
ALPHA = {UNDISTILLED: 0.345, SERVED: 0.6, DRAFT: 0.675}
BLOCKS = [[4, 0, 2, 4, 1, 0, 3], [1, 2, 0, 4, 4, 1], [0, 3, 1, 2, 4, 4, 0, 2]]  # accepted tokens of each, a prompt
PROMPTS = 24
WORDS = ["    ", "total", " =", " 0", "\n", "\t", " naïve", " <b>", "€"]


def speed(tau: float, gamma: int) -> float:
    return tau / (gamma * C + 1 + V_EXTRA * gamma)


def tau_of(alpha: float, gamma: int) -> float:
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def _ends(value: float, width: float) -> list[float]:
    return [value - width, value + 1.1 * width]


def _responses() -> list[dict[str, Any]]:
    rows = [(row, DOMAINS[row % 3], BLOCKS[row % 3]) for row in range(PROMPTS)]
    return [
        {
            "key": f"{domain}-{row:03d}",
            "domain": domain,
            "prompt_tokens": 20 + row,
            "tokens": sum(counts) + len(counts),
            "blocks": len(counts),
            "drafted": GAMMA * len(counts),
            "accepted": sum(counts),
        }
        for row, domain, counts in rows
    ]


def _token_view(live: list[dict[str, Any]], count: int) -> dict[str, Any]:
    responses = []
    for row in range(count):
        writers = [
            (by, block)
            for block, accepted in enumerate(BLOCKS[row % 3])
            for by in ["draft"] * accepted + ["bonus" if accepted == GAMMA else "target"]
        ]
        tokens = []
        for place, (by, block) in enumerate(writers):
            text, other = WORDS[(place + row) % len(WORDS)], WORDS[(place + row + 4) % len(WORDS)]
            tops = [[text, 0.5], [other, 0.25], ["x", 0.1]], [[text if by != "target" else other, 0.625], ["x", 0.1]]
            tokens.append(
                {
                    "text": text,
                    "id": 300 + WORDS.index(text),
                    "by": by,
                    "block": block,
                    "target_prob": 0.5,
                    "draft_prob": 0.01 if by == "target" else 0.625,
                    "target_top": tops[0],
                    "draft_top": tops[1],
                }
            )
        counted = {key: live[row][key] for key in ("key", "domain", "blocks", "accepted", "drafted")}
        responses.append(
            counted | {"prompt": "def total(items):\n", "tokens": tokens, "tokens_count": live[row]["tokens"]}
        )
    return {"way": DRAFT, "rule": "sample", "gamma": GAMMA, "responses": responses}


def _curve(name: str, rule: str, tilt: float) -> dict[str, Any]:
    alpha = ALPHA[name] * tilt
    taus = [tau_of(alpha, gamma) for gamma in GAMMAS]
    return {
        "rule": rule,
        "tokens": 600,
        "prompts": PROMPTS,
        "alpha": alpha,
        "alpha_ci": _ends(alpha, 0.011),
        "gammas": GAMMAS,
        "tau": taus,
        "tau_ci": [_ends(tau, 0.015 * (tau - 1)) for tau in taus],
        "survival": [alpha**j for j in range(1, GAMMA + 1)],
        "predicted_speed_up": [
            speed(tau, gamma) if gamma <= LAST_TIMED else None for gamma, tau in zip(GAMMAS, taus, strict=True)
        ],
    }


def _slices() -> list[dict[str, Any]]:
    def row(name: str, share: float, shift: float = 0.0, prompts: int = PROMPTS) -> dict[str, Any]:
        alphas = {who: alpha + shift for who, alpha in ALPHA.items()}
        gain = alphas[DRAFT] - alphas[UNDISTILLED]
        return {
            "name": name,
            "tokens": 20 * prompts,
            "prompts": prompts,
            "alpha": alphas,
            "alpha_ci": {who: _ends(alpha, 0.02) for who, alpha in alphas.items()},
            "gain": gain,
            "gain_ci": _ends(gain, 0.02),
            "certain": "gain",
            "lost_share": share,
        }

    worse = row("digits", 0.21, -0.1) | {"gain": -0.031, "gain_ci": [-0.05, -0.012], "certain": "loss"}
    classes = {"word start": 0.34, "continuation": 0.11, "punctuation": 0.08, "identifier": 0.2, "whitespace": 0.06}
    tables = [
        {
            "dimension": "domain",
            "unit": "",
            "rows": [row(name, 0.2 + 0.13 * i, 0.0, 8) for i, name in enumerate(DOMAINS)],
        },
        {
            "dimension": "position",
            "unit": "tokens",
            "rows": [row("1-16", 0.38, -0.04), row("17-64", 0.44), row("65 and more", 0.18, 0.03)],
        },
        {
            "dimension": "token class",
            "unit": "",
            "rows": [worse, *(row(name, share) for name, share in classes.items())],
        },
    ]
    return [table | {"corrected_confidence": 1 - 0.05 / len(table["rows"])} for table in tables]


def _measured(tau_live: float, share: float) -> list[dict[str, Any]]:
    """Judged rows of the drafts, then what was timed at 1, 4 and 16 requests."""
    alphas: dict[str, dict[str, Any]] = {
        name: {"alpha": alpha, "alpha_ci": _ends(alpha, 0.011)} for name, alpha in ALPHA.items()
    }
    live = {UNDISTILLED: (tau_of(ALPHA[UNDISTILLED], GAMMA), 0.125), DRAFT: (tau_live, share)}
    rows: list[dict[str, Any]] = [
        {
            "way": name,
            "gamma": GAMMA,
            "tau": tau,
            "tau_ci": _ends(tau, 0.06),
            "accepted_per_drafted": kept,
            "how": {"alpha": "replay", "tau": "live"},
        }
        for name, (tau, kept) in live.items()
    ]
    how = {"alpha": "replay", "tau": "replay"}
    rows.insert(1, {"way": SERVED, "gamma": GAMMA, "tau": tau_of(ALPHA[SERVED], GAMMA), "how": how})
    rows = [row | alphas[row["way"]] for row in rows]
    for load, alone, *speeds in (
        (1, 128.0, (UNDISTILLED, 1, 0.9), (DRAFT, 3, 1.36), (LOOKUP, 8, 1.2), (LOOKUP_DRAFT, 8, 1.3)),
        (4, 410.0, (DRAFT, 3, 1.25), (LOOKUP, 8, 1.1), (LOOKUP_DRAFT, 8, 1.3)),
        (16, 900.0, (DRAFT, 3, 0.92), (LOOKUP, 8, 0.9)),
    ):
        row = {"way": TARGET, "concurrency": load, "tokens_per_second": alone, "speed_up": 1.0}
        waited = {
            "first_token_ms": {"p50": 20.0, "p90": 25.5, "p99": 30.0 * load},
            "stages_ms": {"prefill": 1.0, "verify": 3.0},
        }
        rows.append(row | waited | {"how": {"speed_up": "timed"}})
        for way, gamma, faster in speeds:
            more = alphas.get(way, {"ngrams": [3, 1]})
            more = more | ({"then_gamma": 3, "then_way": DRAFT} if way == LOOKUP_DRAFT else {})
            rows.append(
                {
                    "way": way,
                    "concurrency": load,
                    "gamma": gamma,
                    "tau": 1.2 + faster,
                    "tokens_per_second": faster * alone,
                    "speed_up": faster,
                    "speed_up_ci": _ends(faster, 0.05),
                    "how": {"tau": "replay", "speed_up": "timed"},
                    **more,
                }
            )
    return [{"rule": "sample", "text": "held-out", "concurrency": 1} | row for row in rows]


def _verdict(live: list[dict[str, Any]]) -> dict[str, Any]:
    tokens, blocks = (sum(row[key] for row in live) for key in ("tokens", "blocks"))
    gain, tau_gain = ALPHA[DRAFT] - ALPHA[UNDISTILLED], 1.1
    effects = {
        "alpha": {"gain": gain, "ci": _ends(gain, 0.014)},
        "tau": {"gain": tau_gain, "ci": _ends(tau_gain, 0.07)},
        "speed_up": {"gain": 0.4, "ci": _ends(0.4, 0.04)},
        "confidence": 0.95,
        "looks": 4,
        "corrected_confidence": 0.9875,
        "method": "paired bootstrap over prompts (BCa), Bonferroni over 4 looks",
        "prompts": PROMPTS,
        "tokens": tokens,
        "minimal_detectable": {"alpha": 0.02, "tau": 0.1},
        "prompts_for_half": 4 * PROMPTS,
        "certain": "gain",
    }
    check = {"predicted_blocks": blocks + 2.5, "live_blocks": blocks, "z": -0.2, "agrees": True}
    judged = {"step": 120, "alpha": ALPHA[DRAFT], "tau": tokens / blocks}
    passing = {"prompts": 4, "tokens": 100, "tau": 2.5, "tau_ci": [2.2, 2.8], "accepted_per_drafted": 0.5}
    passing["replay"] = {"predicted_blocks": 38.5, "live_blocks": 40, "z": 0.6, "agrees": True}
    survival = [
        sum(count >= j for row in range(PROMPTS) for count in BLOCKS[row % 3]) / blocks for j in range(1, GAMMA + 1)
    ]
    *first, last = _steps()
    share = {"repeated": 0.3, "looping": 0.02, "tokens": 600}
    return {
        "version": "0.2.0", "rule": "sample", "gamma": GAMMA, "prompts": PROMPTS, "tokens": tokens, "outcome": "pays_off", "pays": True,
        "drafts": [
            {"way": name, "path": f"runs/tiny/{name}", **({} if name == SERVED else {"step": 0 if name == UNDISTILLED else 120})}
            for name in ALPHA
        ],
        "measured": _measured(tokens / blocks, sum(row["accepted"] for row in live) / sum(row["drafted"] for row in live)),
        "run": {"1": DRAFT, "4": LOOKUP_DRAFT, "16": TARGET},
        "headline": "Run the draft: 1.36x [1.31, 1.42] as fast as the target alone in Understudy's decoder.",
        "facts": ["prompt lookup, which needs no training, gives 1.20x."], "gain": effects,
        "against_served": copy.deepcopy(effects) | {"alpha": {"gain": 0.04, "ci": [0.01, 0.07]}, "speed_up": None},
        "survival": survival, "live_tokens": tokens, "replay_check": check,
        "checkpoints": [*first, last | judged | {"live_check": passing}],
        "costs": {
            "target_step_seconds": TARGET_SECONDS, "draft_step_seconds": C * TARGET_SECONDS, "cost_ratio": C,
            "batch_size": 1, "context": 128,
            "verify_ratio": {str(g): 1 + V_EXTRA * g for g in (1, 2, 4, 8, 16)}, "threads": 1,
        },
        "self_checks": {
            "prompts": 8, "tokens": 686, "dtype": "float32", "alpha_replay": 0.9999997, "alpha_live": 1.0, "alpha_tolerance": 0.0009,
            "greedy_equal": 8, "near_ties": [],
        },
        "best_gamma_range": [2, 4], "plain_wins_from": 12, "roofline": {
            "target_fixed_seconds": 0.0084, "target_seconds_per_token": 0.0002, "draft_fixed_seconds": 0.002,
            "draft_seconds_per_token": 0.0001, "free_tokens": 42.0,
        },
        "latency_loads": {TARGET: 4, DRAFT: 1},
        "repetition": {"repeated": 0.155, "looping": 0.0076, "tokens": 1580, "by_domain": dict.fromkeys(DOMAINS, share)},
        "warnings": ["the held-out prompts come from 3 domains; the served ones may not"], "seconds": {"judge": 12.5},
    }  # fmt: skip


def _steps() -> list[dict[str, Any]]:
    steps = []
    for step, share in ((0, 0.0), (40, 0.7), (80, 0.9), (120, 1.0)):
        gain = share * (ALPHA[DRAFT] - ALPHA[UNDISTILLED])
        alpha = ALPHA[UNDISTILLED] + gain
        tau = tau_of(alpha, GAMMA)
        row = {"step": step, "alpha": alpha, "alpha_ci": _ends(alpha, 0.011), "tau": tau, "tau_ci": _ends(tau, 0.06)}
        steps.append(row | ({"gain": {"gain": gain, "ci": _ends(gain, 0.014)}} if step else {}))
    return steps


def example_result(responses: int = 8) -> dict[str, Any]:
    """Everything a timed run with an undistilled and a served draft has to show."""
    live = _responses()
    said = [
        ("if count", " <", " >", 31),
        ("total =", " 0", " 1", 22),
        ("items:\n", "\t", "    ", 17),
        ("a | b", "`x`", "*y*", 3),
    ]
    rules = (("sample", 1.0, ""), ("greedy-draft", 0.93, "vLLM's default"), ("block", 1.02, ""))
    config = '{"method":"draft_model","model":"/d","num_speculative_tokens":3}'
    return {
        "format": 2, "version": "0.2.0", "kind": "run", "name": "tiny", "made": "2026-11-20T19:00:00+00:00", "verdict": _verdict(live),
        "curves": {
            "gammas": GAMMAS,
            "rules": [
                {"rule": rule, "ways": {name: _curve(name, rule, tilt) for name in ALPHA}, "note": note} for rule, tilt, note in rules
            ],
            "refused": {"greedy": "needs text that was answered at temperature 0"},
        },
        "slices": _slices(),
        "disagreements": [
            {
                "context": context, "target_said": target, "draft_wanted": draft, "count": count, "prompts": min(count, 9),
                "lost_share": count / 400, "tau_if_agreed": 2.6 + count / 400, "tokens_per_second_lost": count / 10,
            }
            for context, target, draft, count in said
        ],
        "trained_on": list(DOMAINS[:2]),
        "timed_prompts": {row["key"]: {TARGET: 128.0, DRAFT: 150.0} for row in live[:7]},
        "token_view": _token_view(live, responses),
        "serve": [
            {"engine": "vLLM", "ok": True, "language": "bash", "note": "draft argmax by default",
             "command": f"vllm serve t --speculative-config '{config}'"},
            {"engine": "llama.cpp", "ok": False, "language": "bash", "note": "refuses it: sizes differ by 200",
             "command": "llama-server -m T.gguf"},
        ],
        "config": "name: tiny\nserving:\n  temperature: 0.7\n",
        "provenance": {
            "commit": "fc6a3871", "uncommitted_changes": "sha256 0123", "argv": ["understudy", "train", "my config.yaml"], "threads": 2,
            "versions": {"torch": "2.13.0"}, "machine": "x86_64", "device": "cpu", "sampling": {"temperature": 0.7, "top_p": 1.0},
        },
        "files": {"proposals": "proposals.parquet"},
    }  # fmt: skip


def typed(tree: dict[str, Any]) -> Result:
    """The result that such a file holds."""
    return Result.model_validate(copy.deepcopy(tree))


def not_timed(result: dict[str, Any]) -> dict[str, Any]:
    """The same run judged without the target's weights: replay alone, nothing decoded, nothing timed."""
    made = copy.deepcopy(result)
    verdict = made["verdict"]
    judged = [row for row in verdict["measured"] if "speed_up" not in row]
    for row in judged:
        row["how"]["tau"] = "replay"
        row.pop("tau_ci", None)
        row.pop("accepted_per_drafted", None)
    gone = "run costs self_checks plain_wins_from best_gamma_range roofline latency_loads pays survival replay_check live_tokens"
    for key in gone.split():
        del verdict[key]
    verdict |= {"outcome": "not_timed", "headline": "Not timed here: the draft has more.", "facts": []}
    verdict["measured"] = judged
    del verdict["checkpoints"][-1]["live_check"]
    for curves in made["curves"]["rules"]:
        for curve in curves["ways"].values():
            del curve["predicted_speed_up"]
    for key in ("token_view", "timed_prompts"):
        del made[key]
    return made


def no_baseline(result: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of one draft that was not trained here."""
    made = copy.deepcopy(result)
    verdict = made["verdict"]
    gone = (UNDISTILLED, SERVED)
    verdict["drafts"] = [{"way": DRAFT}]
    verdict["measured"] = [row for row in verdict["measured"] if row["way"] not in gone]
    for key in ("gain", "against_served"):
        del verdict[key]
    for curves in made["curves"]["rules"]:
        curves["ways"] = {DRAFT: curves["ways"][DRAFT]}
    for row in (row for table in made["slices"] for row in table["rows"]):
        row["alpha"] = {DRAFT: row["alpha"][DRAFT]}
        for key in ("gain", "gain_ci", "certain"):
            del row[key]
    verdict["checkpoints"] = verdict["checkpoints"][-1:]
    for key in ("trained_on", "serve"):
        del made[key]
    return made | {"kind": "evaluation"}


def greedy(result: dict[str, Any]) -> dict[str, Any]:
    """Temperature 0: one rule, and no probability of what was emitted."""
    made = copy.deepcopy(result)
    made["verdict"]["rule"] = made["token_view"]["rule"] = made["curves"]["rules"][0]["rule"] = "greedy"
    made["curves"] = {"gammas": GAMMAS, "rules": made["curves"]["rules"][:1]}
    for response in made["token_view"]["responses"]:
        for token in response["tokens"]:
            token |= {"target_prob": None, "draft_prob": None}
    return made


def bare(result: dict[str, Any]) -> dict[str, Any]:
    """Only what every result has; each optional section is gone."""
    made = {key: copy.deepcopy(result[key]) for key in ("format", "version", "kind", "name", "made", "verdict")}
    verdict = made["verdict"]
    verdict["measured"] = [row for row in verdict["measured"] if "speed_up" not in row]
    kept = ("version", "rule", "gamma", "prompts", "tokens", "outcome", "drafts", "measured", "headline", "survival")
    last = {"checkpoints": verdict["checkpoints"][-1:]}
    return made | {"verdict": {key: verdict[key] for key in kept} | last}
