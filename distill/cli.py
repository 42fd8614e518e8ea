"""The `understudy` command. Training itself is `accelerate launch -m distill.train CONFIG`."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from distill.commands.judging import add_to
from distill.faults import check_imports
from speculative.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Draft models that a target LLM agrees with: evaluate and export them. "
    "Train with `accelerate launch -m distill.train CONFIG key=value ...`.",
)
READER_LEFT = 141  # As the shell reports a program ended by SIGPIPE.
DEMO_CONFIG = "configs/demo.yaml"


@app.command()
def demo(
    config: Annotated[str, typer.Argument(help="the demo's config")] = DEMO_CONFIG,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. train.steps=100")] = None,
) -> None:
    """Distil, judge and export a draft for the embedded target; ends with the numbers and what to type next."""
    from distill import train as program
    from distill.config.load import load_config

    status = program.main([config, *(overrides or [])])
    if status:
        raise typer.Exit(status)
    run = load_config(config, overrides or []).folder
    exported = _export(run, run / "export", "auto", overwrite=True)
    _show(run, exported.path)


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="YAML file, e.g. configs/demo.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. optim.lr=3e-4")] = None,
) -> None:
    """Train on this machine's one device; for several use `accelerate launch -m distill.train CONFIG`."""
    from distill import train as program

    raise typer.Exit(program.main([config, *(overrides or [])]))


@app.command()
def evaluate(
    draft: Annotated[str, typer.Argument(help="run folder, checkpoint folder, model directory or hub id")],
    config: Annotated[str, typer.Option(help="config that names the target, held-out prompts and serving settings")],
    gamma: Annotated[str, typer.Option(help="drafted tokens per block: 5, or a range 1:8")] = "",
    rule: Annotated[
        str, typer.Option(help="sample, greedy-draft, greedy or block; default: the config's judge.rule")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="print the result as JSON, in the shape of verdict.json")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="where the result is written; every drafted token beside it as .proposals.parquet")
    ] = Path("result.json"),
    losslessness: Annotated[
        bool,
        typer.Option("--losslessness", help="instead: prove that the text is the target's own; exit 1 when it is not"),
    ] = False,
    scorer: Annotated[
        str,
        typer.Option(
            help="instead: task scores with and without the draft by exact-match, exact-match-number, module:function or file.py:function"
        ),
    ] = "",
    references: Annotated[
        Path | None, typer.Option(help='answers for --scorer: JSON lines with "prompt" and "reference"')
    ] = None,
    prompts: Annotated[int, typer.Option(help="held-out prompts for --losslessness and --scorer", min=1)] = 32,
    samples: Annotated[
        int, typer.Option(help="responses per prompt for --losslessness (0 = 16) and --scorer (0 = 1)", min=0)
    ] = 0,
    control: Annotated[
        bool,
        typer.Option(
            help="--losslessness: a third set of texts at 1.1 times the temperature, which must be told apart"
        ),
    ] = True,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the config")] = None,
) -> None:
    """Judge a draft by real speculative decoding on held-out prompts: a table and result.json (`understudy report result.json`)."""
    from distill.commands.evaluate.evaluate import parse_gammas
    from distill.config.load import load_config
    from speculative.rules.verify import RULES

    settings = load_config(config, overrides or [])
    chosen: Any = rule or settings.judge_rule
    if chosen not in RULES:
        raise UserError(f"--rule {rule}: one of {', '.join(RULES)}")
    gammas = parse_gammas(gamma) if gamma else [settings.judge.gamma]
    if losslessness or scorer:
        if len(gammas) > 1:
            raise UserError(f"--gamma {gamma}: --losslessness and --scorer take one gamma")
        _prove(settings, draft, chosen, gammas[0], losslessness, scorer, references, prompts, samples, control, as_json)
        return
    if references is not None:
        raise UserError("--references goes with --scorer")
    _evaluate(settings, draft, gammas, chosen, as_json, out)


def _evaluate(settings: Any, draft: str, gammas: list[int], rule: Any, as_json: bool, out: Path) -> None:
    from data.files import write_json
    from distill.commands.evaluate.evaluate import evaluate as judge_draft
    from distill.commands.output import check_writable
    from distill.report.screen import judgement_table

    check_writable("--out", out)
    if _is_of_a_run(out):
        raise UserError(f"--out {out}: holds the result of a training run; give another name")
    result, by_gamma = judge_draft(settings, draft, gammas, rule, out.with_suffix(".proposals.parquet"))
    result["gammas"] = {str(number): record for number, record in by_gamma.items()}
    _writable(out, write_json, result)
    verdict = result["verdict"]
    if as_json:
        print(json.dumps(verdict, indent=2))
        return
    console = Console()
    for number, record in sorted(by_gamma.items()):
        console.print(judgement_table(f"rule {rule}, gamma {number}", record))
    console.print(verdict["sentence"], style="bold")
    console.print(
        f"best gamma {verdict['best_gamma']}, predicted speed-up {verdict['predicted_speed_up']:.2f}x; "
        f"target alone {verdict['target_tokens_per_second']:.0f} tokens/s, with the draft {verdict['best']['tokens_per_second']:.0f}; "
        f"written to {out} (a page of it: understudy report {out})",
        highlight=False,
    )


def _is_of_a_run(path: Path) -> bool:
    """Whether a training run's own result.json is there: drift and report read it."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("kind") == "run"
    except (OSError, ValueError, AttributeError):
        return False


def _prove(
    settings: Any, draft: str, rule: Any, gamma: int, losslessness: bool, scorer: str, references: Path | None,
    prompts: int, samples: int, control: bool, as_json: bool,
) -> None:  # fmt: skip
    """The tests for a doubter; exit status 1 when one fails."""
    from distill.commands.evaluate import losslessness as lossless_command
    from distill.commands.evaluate import scores as task_scores

    results: dict[str, Any] = {}
    lines: list[str] = []
    if losslessness:
        results["losslessness"] = lossless_command.losslessness(
            settings, draft, rule=rule, gamma=gamma, prompts=prompts, samples=samples or 16, control=control
        )
        lines += lossless_command.lossless_lines(results["losslessness"])
    if scorer:
        results["scores"] = task_scores.task_scores(
            settings,
            draft,
            scorer,
            rule=rule,
            gamma=gamma,
            prompts=prompts,
            samples=samples or 1,
            references=references,
        )
        lines += task_scores.score_lines(results["scores"])
    print(json.dumps(results, indent=2) if as_json else "\n".join(lines))
    if not all(found["passed"] for found in results.values()):
        raise typer.Exit(1)


add_to(app)


@app.command()
def respond(
    config: Annotated[str, typer.Argument(help="YAML file, e.g. configs/demo.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. signal.k=32")] = None,
    signal: Annotated[
        str,
        typer.Option(
            help="keep the target's distributions too: topk, sampled or none; default: what the config's signal.source needs"
        ),
    ] = "",
) -> None:
    """Let the target answer the prompts; with --signal, training needs it no more (signal.source=store).

    On several devices: `accelerate launch -m distill.respond CONFIG --signal topk`.
    """
    from distill import respond as program

    raise typer.Exit(program.main([config, *(overrides or []), *(["--signal", signal] if signal else [])]))


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="sweep file, e.g. configs/sweeps/objectives.yaml")],
    launcher: Annotated[
        str, typer.Option(help='before `-m distill.train`, e.g. "accelerate launch --num_processes 2"')
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the runs and stop")] = False,
) -> None:
    """Train every combination of a grid, resumable, and compare them in one table with intervals."""
    from distill.commands.sweep.sweep import run_sweep

    run_sweep(file, launcher, dry_run)


@app.command("generate")
def generate_command(
    target: Annotated[str, typer.Argument(help="target: directory, hub id or `embedded`")],
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt; may be given several times")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='file: JSON lines with "prompt" (.jsonl), else one prompt a line; without any, one on standard input'
        ),
    ] = None,
    chat: Annotated[bool, typer.Option(help="wrap each prompt in the target's chat template")] = False,
    system: Annotated[str, typer.Option(help="system message (with --chat)")] = "",
    draft: Annotated[str, typer.Option(help="draft model: directory, hub id, run or checkpoint folder")] = "",
    drafter: Annotated[
        str,
        typer.Option(
            help="who proposes: draft (default with --draft), lookup (the prompt's own n-grams), retrieval, early-exit, "
            "jacobi, cascade (lookup, then the draft), none (default without)"
        ),
    ] = "",
    exit_layers: Annotated[int, typer.Option(help="layers of early-exit; 0 = a third")] = 0,
    datastore: Annotated[
        Path | None, typer.Option(help="past texts for retrieval: --out file of an earlier run")
    ] = None,
    gamma: Annotated[
        str, typer.Option(help="drafted tokens per block (default 4), or auto: what pays most, none included")
    ] = "",
    stop_below: Annotated[float, typer.Option(help="stop drafting behind a token of less probability; 0 = off")] = 0.0,
    tree: Annotated[str, typer.Option(help="candidates per depth instead of a chain, e.g. 3,2,1")] = "",
    rule: Annotated[
        str, typer.Option(help="sample, greedy-draft, greedy, block; default: greedy at temperature 0, else sample")
    ] = "",
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="keep the k most probable tokens; 0 = off")] = 0,
    top_p: Annotated[float, typer.Option(help="nucleus sampling; 1 = off")] = 1.0,
    min_p: Annotated[float, typer.Option(help="drop tokens under min-p x the largest probability; 0 = off")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 = off")] = 1.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="tokens of a response at most; default: 128, or what the context leaves behind its prompt"),
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="no end token before so many")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="a text that ends a response; may be given several times")
    ] = None,
    seed: Annotated[int, typer.Option(help="of all sampling")] = 0,
    batch_size: Annotated[int, typer.Option(help="rows decoded at once", min=1)] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: cuda where there is one")] = "",
    runner: Annotated[str, typer.Option(help="model calls: auto, eager, compile, graph (CUDA)")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="write responses here as JSON lines; without it, several are printed as they end"),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="write every drafted token here as parquet")] = None,
    numbers: Annotated[Path | None, typer.Option(help="write the run's numbers here as JSON")] = None,
) -> None:
    """Text from a target, sped up by a draft; the text is the target's own. Numbers go to standard error.

    understudy generate embedded --prompt "def add(a, b):" --draft runs/demo/export --gamma auto
    """
    options = dict(locals())
    from distill.commands.generate import generate as program

    for line in program.command(program.Options(**options)):
        print(line, file=sys.stderr)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="run folder (its best checkpoint) or a checkpoint folder")],
    to: Annotated[Path, typer.Option(help="directory to make")],
    dtype: Annotated[
        str, typer.Option(help="auto = the dtype the target is saved in; float32, bfloat16, float16")
    ] = "auto",
    overwrite: Annotated[bool, typer.Option(help="replace an earlier export there")] = False,
) -> None:
    """Write the best draft as an ordinary Hugging Face directory with the commands to serve it."""
    from distill.report.screen import export_lines

    for line in export_lines(_export(run, to, dtype, overwrite)):
        print(line)


@app.command("check-export")
def check_export(
    exported: Annotated[Path, typer.Argument(help="an exported directory")],
    config: Annotated[str, typer.Option(help="config that names the target and held-out prompts")],
    prompts: Annotated[int, typer.Option(help="held-out prompts", min=1)] = 20,
    gamma: Annotated[int, typer.Option(help="drafted tokens per block", min=1, max=16)] = 4,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the config")] = None,
) -> None:
    """Run an exported draft in transformers' own assisted generation: same greedy tokens? same tau as ours?"""
    from distill.config.load import load_config
    from distill.export.check import outside_check

    found = outside_check(load_config(config, overrides or []), exported, prompts, gamma)
    theirs, ours = found["transformers"], found["ours"]
    print(f"same greedy tokens as the target alone on {found['equal']} of {found['prompts']} prompts")
    if found["first_difference"]:
        print(f"first difference: {found['first_difference']}")
    print(
        f"tau at gamma {gamma}: transformers {theirs['tau']:.3f}, ours {ours['tau']:.3f} "
        f"[{ours['tau_ci'][0]:.3f}, {ours['tau_ci'][1]:.3f}]"
    )
    if found["equal"] < found["prompts"] or not found["within_interval"]:
        raise typer.Exit(1)


@app.command()
def show(run: Annotated[Path, typer.Argument(help="run folder")]) -> None:
    """The verdict of a finished run, with completions whose accepted tokens are marked."""
    _show(run, run / "export" if (run / "export").exists() else None)


@app.command()
def tokenizer(
    to: Annotated[Path, typer.Option(help="directory to write")],
    source: Annotated[str, typer.Option(help="text to learn from: `stdlib`, a file, directory or hub id")] = "stdlib",
    vocab_size: Annotated[int, typer.Option(help="number of tokens", min=300)] = 4096,
    max_length: Annotated[int, typer.Option(help="context of the model it is for, in tokens", min=8)] = 2048,
) -> None:
    """Train a byte-level BPE tokenizer, for a model that starts from nothing."""
    from data.prompts import stdlib
    from data.tokenizer import save_tokenizer, train_tokenizer
    from distill.config.sections import SourceConfig
    from distill.training.corpus import documents_of

    texts = (
        [text for _, text in stdlib.modules(False)] if source == "stdlib" else documents_of(SourceConfig(path=source))
    )
    made = train_tokenizer(texts, vocab_size, max_length)
    save_tokenizer(made, to)
    print(f"{len(made)} tokens learnt from {len(texts)} texts, written to {to}")


@app.command("publish-target")
def publish(
    run: Annotated[Path, typer.Argument(help="pre-training run, e.g. runs/target")],
    to: Annotated[Path, typer.Option(help="folder of the shipped target")] = Path("distill/embedded"),
) -> None:
    """Put a pre-trained model where the package ships its embedded target, with a card (part of `make target`)."""
    from distill.commands.publish import publish_target

    card = publish_target(run, to)
    print(
        f"{card['parameters']:,} parameters, held-out loss {card['heldout_loss_nats']:.3f}, fingerprint {card['fingerprint']}: {to}"
    )


@app.command("config")
def config_reference() -> None:
    """Every key of a config with its default and meaning."""
    from distill.config.table import config_table

    print(config_table())


def _export(run: Path, to: Path, dtype: str, overwrite: bool) -> Any:
    from distill.export.export import export_draft
    from distill.run.folder import read_run

    facts = read_run(run)
    return export_draft(
        student_dir=facts.student, target=facts.target, to=to, dtype=dtype, verdict=facts.verdict, provenance=facts.provenance,
        sampling=facts.sampling, overwrite=overwrite, revision=facts.revision, trust_remote_code=facts.trust_remote_code,
    )  # fmt: skip


def _show(run: Path, exported: Path | None) -> None:
    from distill.commands.show import held_out_completions
    from distill.report.screen import last_screen
    from distill.run.folder import load_verdict

    verdict = load_verdict(run)
    # A target that is only served elsewhere cannot show what it accepts.
    shown = held_out_completions(run, count=3) if verdict["target_tokens_per_second"] is not None else []
    last_screen(Console(), run, verdict, shown, exported)


def _writable(path: Path, write: Any, value: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, value)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def main() -> None:
    """Entry point: a mistake of the user is one line and exit status 2."""
    try:
        check_imports()
        app()
    except BrokenPipeError:
        # Whoever read our output has left (`| head`): no more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_LEFT)
    except (Exception, KeyboardInterrupt) as error:
        from distill.faults import explain

        explained = explain(error)
        if explained is None:
            raise
        print(explained[0], file=sys.stderr)
        sys.exit(explained[1])


if __name__ == "__main__":
    main()
