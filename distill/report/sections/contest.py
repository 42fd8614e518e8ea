"""Sections on speed: every way to decode, one request at a time and under load, and latency."""

from distill.report.measured import engine_parts, load_table, stages_table, waits_table, ways_tables
from distill.report.section import Content, Piece, section
from distill.report.view import View
from distill.run.verdict_record import Verdict
from speculative.measure.effects import Effects, words


@section("numbers", "The numbers", order=10)
def numbers(view: View) -> Content:
    """The tables of ways, and how certain the gain is."""
    effects = (Piece("fine", line) for line in effect_lines(view.verdict))
    return [*ways_tables(view.verdict), *effects, Piece("nav", None)]


def effect_lines(verdict: Verdict) -> list[str]:
    """How certain the gain is, and which difference these prompts can detect."""
    gain, against_served = verdict.gain, verdict.against_served
    served = [f"Against the served draft, paired by prompt: {words(against_served)}."] if against_served else []
    if not gain:
        return served
    return [
        f"Gain over the undistilled draft, paired by prompt: {words(gain)}.",
        *served,
        f"Both drafts are compared on the same {gain.prompts:,} prompts ({gain.tokens:,} tokens), with tau and speed-up by "
        "replay, so a gain can differ from the difference of two live runs. "
        f"{gain.method[0].upper()}{gain.method[1:]}; {_confidence(gain)}.",
    ]


def _confidence(effects: Effects) -> str:
    if effects.looks <= 1:
        return f"intervals of {100 * effects.confidence:.0f} %"
    return f"intervals of {100 * effects.corrected_confidence:.2f} % each, {100 * effects.confidence:.0f} % jointly"


@section("load", "Under load", order=50)
def load(view: View) -> Content:
    """The speed-up of each way at each number of concurrent requests."""
    verdict = view.verdict
    return [*load_lines(verdict), load_table(verdict)] if max(verdict.concurrencies, default=1) > 1 else None


def load_lines(verdict: Verdict) -> list[str]:
    """From which load plain decoding is faster, and from which size verification is not free."""
    lines = [
        "Speed-up over the target alone at the same load. tokens/s are of all requests together. Each way uses its own best gamma at that "
        "load. The way to run is bold."
    ]
    wins, most = verdict.plain_wins_from, max(verdict.concurrencies)
    if wins is None:
        lines.append("The draft is predicted to be faster than plain decoding at every load up to 4096 requests.")
    elif wins == 1:
        lines.append("Plain decoding is faster than the draft by itself at every load.")
    else:
        how = "" if wins <= most else f" (predicted: at most {most} were measured)"
        lines.append(f"From {wins:,} concurrent requests on, plain decoding is faster than the draft by itself{how}.")
    free = verdict.roofline.free_tokens if verdict.roofline else None
    if free is not None:
        lines.append(
            f"A target call with {free:,.0f} tokens takes twice its fixed time, so verification is not free there. A block feeds "
            "the target gamma + 1 tokens of every request."
        )
    return lines


@section("engine", "In the engine", order=51)
def engine(view: View) -> Content:
    """What engine_costs.json predicts (`understudy time`)."""
    return engine_parts(view.verdict) or None


@section("latency", "Latency", order=52)
def latency(view: View) -> Content:
    """Waits for the first and for every further token, and the stages of a block, at every load."""
    rows = view.verdict.measured
    if not any(row.first_token_ms for row in rows):
        return None
    line = (
        "Each client asks again when its response ends. The first token waits for the target to read the prompt and for "
        "requests that arrive together; the draft reads the prompt after it (on CUDA before it). Per token: (last - first) / "
        "(tokens - 1). 99 of 100 are at most p99."
    )
    return [line, waits_table(rows), stages_table(rows)]
